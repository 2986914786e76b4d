"""Where a worker may fetch images from, and what a fetch may take.

An entry of the list is a host's name, or `*.SUFFIX`, which stands for every name that ends so and not for SUFFIX alone.
Such a host is reached by https at port 443. Behind `http://` the same stands for plain http at port 80, and for nothing
else: what neither side can check is a choice of its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_HOSTS = 64
LONGEST_HOST = 262  # http://, *. and a name of 253
FETCH_SECONDS = 10.0
"""Of one image, from waiting for its turn to its last byte, redirects included."""

FETCHES = 16
"""At a time in a worker."""

FETCHES_OF_ENTRY = 8
"""At a time from the hosts of one entry: while those are slow the others have places."""

REDIRECTS = 3
PORTS = {"https": 443, "http": 80}
HOST_PATTERN = r"^(http://)?(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
_HOST = re.compile(HOST_PATTERN)


class UrlHost(NamedTuple):
    """An entry: `name`, or with `below` all names below it, by `scheme`."""

    scheme: str
    name: str
    below: bool

    @classmethod
    def parse(cls, entry: str) -> UrlHost:
        """Raises ValueError for what is no entry."""
        if len(entry) > LONGEST_HOST or not _HOST.fullmatch(entry):
            raise ValueError(
                f"{entry[:LONGEST_HOST]!r} is no host to fetch from: name one as images.example.com, or all below it "
                "as *.example.com, behind http:// where it has no https; no address, no port, no path"
            )
        scheme, found, rest = entry.rpartition("://")
        name = rest.removeprefix("*.")
        return cls(scheme if found else "https", name, name != rest)

    def holds(self, scheme: str, host: str) -> bool:
        """`host` in small letters."""
        return scheme == self.scheme and (host.endswith(f".{self.name}") if self.below else host == self.name)


def url_hosts(entries: list[str] | tuple[str, ...]) -> tuple[UrlHost, ...]:
    """Raises ValueError for an entry that is none, or stands twice."""
    if len(set(entries)) < len(entries):
        raise ValueError("a host stands twice among those that images are fetched from")
    return tuple(map(UrlHost.parse, entries))
