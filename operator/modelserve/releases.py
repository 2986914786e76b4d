"""Release numbers, and which release of a worker an image holds."""

from __future__ import annotations

import re

_TAG = re.compile(r":v?(?P<release>[0-9]+\.[0-9]+\.[0-9]+[A-Za-z0-9.-]*)(@sha256:[0-9a-f]+)?$")


def release_number(release: str) -> tuple[int, ...]:
    """The numbers at the head of a version, for comparing; what is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("+")[0].split("-")[0].split("."))


def release_of_image(image: str) -> str | None:
    """The release that the tag of a worker image names, as `0.1.0` or `v0.1.0`; None for another tag, or a digest."""
    found = _TAG.search(image)
    return found["release"] if found else None
