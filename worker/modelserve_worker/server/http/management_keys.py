"""Who may say which adapters are served: keys of a mounted file that has their digests alone."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

from modelserve_worker.server.http.key_digests import Stamp, file_stamp, is_known, key_digest

ADAPTERS_PATH = "/v1/adapters"
SET_FILE, KEYS_FILE = "adapters.json", "management-keys"
_PREFIX = "sha256:"
_LOOK_INTERVAL_S = 1.0
_MOST_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class ManagementKeys:
    """SHA-256 of each key, one a line (`sha256:HEX`), of a file that may not be there yet and is read again as it
    changes. Nobody is let in without it; one that cannot be read leaves the last keys in force."""

    def __init__(self, file: Path, *, look_interval_s: float = _LOOK_INTERVAL_S) -> None:
        self._file, self._look_interval_s = file, look_interval_s
        self._digests: tuple[bytes, ...] = ()
        self._stamp: Stamp | None = None
        self._next_look_s = 0.0

    def opens(self, key: str) -> bool:
        """Whether it is one of them."""
        self._look()
        return is_known(key_digest(key), self._digests)

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + self._look_interval_s
        try:
            stamp = file_stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            if (size := stamp[-1]) > _MOST_BYTES:
                raise ValueError(f"it has {size} bytes")
            lines = [line.strip() for line in self._file.read_text(encoding="ascii").splitlines()]
            self._digests = tuple(map(_digest, (line for line in lines if line and not line.startswith("#"))))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.error("management keys: %s: %s; the last keys stay in force", self._file, error)


def _digest(line: str) -> bytes:
    digest = bytes.fromhex(line.removeprefix(_PREFIX))
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("a line is no SHA-256")
    return digest
