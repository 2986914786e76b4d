"""What an http or https address says, where it is one that may be fetched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from modelserve.sizing.media.image_urls import PORTS, UrlHost
from modelserve_worker.media.media_error import MediaUrlRefused

_LONGEST = 8192
_SHOWN = 60
_PLAIN = re.compile(r"[!-\[\]-~]+")  # printable ASCII but the backslash, which some read as a slash


class Place(NamedTuple):
    """`target` is path and query; `entry` that of the list which allows it."""

    scheme: str
    host: str
    target: str
    entry: UrlHost

    @property
    def port(self) -> int:
        return PORTS[self.scheme]

    @property
    def shown(self) -> str:
        """Without the query, which may be a signature."""
        return shown(f"{self.scheme}://{self.host}{self.target.partition('?')[0]}")


def place_of(url: str, hosts: Sequence[UrlHost]) -> Place:
    """Raises MediaUrlRefused for what is not on the list, or is no plain address."""
    what = shown(url.partition("?")[0])
    if len(url) > _LONGEST:
        raise MediaUrlRefused(f"{what!r}: the address has {len(url)} characters; the limit is {_LONGEST}")
    if not _PLAIN.fullmatch(url):
        raise MediaUrlRefused(f"{what!r}: an address is of printable ASCII without spaces and backslashes; encode it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise MediaUrlRefused(f"{what!r} is no address: {error}") from error
    scheme = parts.scheme
    if "@" in parts.netloc:
        raise MediaUrlRefused("an address with a user or a password in it is not fetched; leave them out")
    entry = next((each for each in hosts if each.holds(scheme, host)), None)
    if entry is None:
        raise MediaUrlRefused(
            f"{what!r}: images and sounds are not fetched from there; send the file itself, as data:TYPE;base64,..., "
            "or plan its host (spec.modalities.image.urls)"
        )
    if port not in (None, PORTS[scheme]):
        raise MediaUrlRefused(f"{what!r}: {scheme} is reached at port {PORTS[scheme]} alone; leave the port out")
    return Place(scheme, host, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), entry)


def shown(url: str) -> str:
    return url[:_SHOWN] + ("..." if len(url) > _SHOWN else "")
