"""Digests of keys, and files of them that are read again as they change."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, int, int]


def key_digest(key: str) -> bytes:
    """SHA-256 of a key as it came."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_known(digest: bytes, digests: Iterable[bytes]) -> bool:
    """Whether it is one of them; all are compared, in constant time."""
    known = False
    for each in digests:
        known |= hmac.compare_digest(digest, each)
    return known


def file_stamp(file: Path) -> Stamp:
    """Changes with the file; what is mounted is a link to another folder then. Raises OSError."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
