"""Which IP addresses are anybody's: those of the internet, and none that lead into a network, a host or its cloud.

Beside what registries list as not global, addresses that carry others inside (mapped, translated or tunnelled IPv4) are
none, since who routes them decides where they lead, and neither is the one at which Azure answers its machines. Of IPv6
what is given out for the internet is 2000::/3; mapped addresses and NAT64 lie outside of it.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network

_GIVEN_OUT = ip_network("2000::/3")
_NOT_PUBLIC = tuple(
    ip_network(each)
    for each in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # shared by a carrier's clients; Alibaba's metadata
        "168.63.129.16/32",  # Azure, to its machines
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "240.0.0.0/4",
        "2001::/23",  # Teredo, ORCHID and other registries' own
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)


def is_public(address: str) -> bool:
    """Of an address in digits; what is none is not."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and (ip.scope_id or ip not in _GIVEN_OUT):
        return False
    inside = any(ip.version == network.version and ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not ip.is_multicast and not inside
