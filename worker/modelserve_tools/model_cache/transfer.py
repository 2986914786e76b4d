"""One file of the Hub, brought to a folder: by ranges from where an earlier try stopped, verified, then renamed.

The Hub says what each file's content hashes to: the SHA-256 of files that Git LFS or Xet keeps, Git's own SHA-1 of the
small ones. Nothing takes the file's name before its bytes have that hash, so whoever sees the name sees the file.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modelserve.errors import InvalidInput
from modelserve_tools.hub_client import DownloadError
from modelserve_tools.model_cache.progress import Progress

SILENCE_S = 30.0
BLOCK_BYTES = 1 << 20
PARTIAL_FOLDER = ".modelserve-incomplete"
FRUITLESS_TRIES = 5  # in a row that bring no byte
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


class HashMismatchError(InvalidInput):
    """Bytes that arrived twice are not those that the Hub says it has."""


class CacheFullError(InvalidInput):
    """The volume has no room for the model."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class HubFile:
    """A file of a commit. `sha256`: of its content; `blob`: its Git object id, where there is no SHA-256. Both None:
    the Hub, as some mirrors, does not say, and the size alone is compared."""

    name: str
    size: int
    sha256: str | None = None
    blob: str | None = None

    def hasher(self) -> _Hash:
        """Hashes what `expected` is of."""
        if self.sha256 is None and self.blob is not None:
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return hashlib.sha256()

    @property
    def expected(self) -> str | None:
        """The hash that its content must have."""
        return self.sha256 or self.blob


def intact(path: Path, file: HubFile, *, verify: bool) -> bool:
    """Whether the file is there whole; with `verify` also whether its content has the right hash."""
    try:
        if path.stat().st_size != file.size:
            return False
    except FileNotFoundError:
        return False
    if not verify or file.expected is None:
        return True
    hasher = file.hasher()
    _hash_file(path, hasher)
    return hasher.hexdigest() == file.expected


def partial_of(folder: Path, file: HubFile) -> Path:
    """Where its bytes are until they are all there."""
    return folder / PARTIAL_FOLDER / file.name


def bring(
    file: HubFile,
    url: str,
    folder: Path,
    *,
    headers: Mapping[str, str],
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Make `folder` hold the file under its name.

    Raises HashMismatchError when what arrives from the first byte on has another hash than the Hub says, CacheFullError
    when the disk or a quota is full, DownloadError when nothing more arrives, and what the Hub's client raises for an
    answer that is an error.
    """
    partial = partial_of(folder, file)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        for fresh in (False, True):
            if fresh:
                logger.warning("%s has another hash than the Hub says: it is fetched anew", file.name)
                progress.found(-partial.stat().st_size)
                partial.unlink()
            got = _fill(partial, file, url, headers=headers, progress=progress, pause=pause)
            if file.expected in (None, got):
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                partial.replace(folder / file.name)
                return
        progress.found(-partial.stat().st_size)
        partial.unlink()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CacheFullError(
            f"{folder} is full: {file.name} has {file.size} bytes, and {os.strerror(error.errno or 0).lower()}: give "
            "the volume more room, or free some; what was fetched stays, and the next try goes on from there"
        ) from error
    raise HashMismatchError(
        f"{file.name}: {file.size} bytes arrived twice, whose hash is {got}; the Hub says {file.expected}: what lies "
        "between changes them (a proxy or a mirror), or the repository is damaged"
    )


def _fill(
    partial: Path,
    file: HubFile,
    url: str,
    *,
    headers: Mapping[str, str],
    progress: Progress,
    pause: Callable[[float], None],
) -> str:
    """Append what is missing, over as many connections as it takes; the hash of all."""
    hasher, fruitless = file.hasher(), 0
    with partial.open("a+b") as stream:
        if os.fstat(stream.fileno()).st_size > file.size:
            stream.truncate(0)
        held = _hash_file(partial, hasher)
        progress.found(held)
        while held < file.size:
            before = held
            try:
                held = _receive(stream.fileno(), held, hasher, file, url, headers=headers, progress=progress)
            except ConnectionError as error:
                held = os.fstat(stream.fileno()).st_size
                fruitless = fruitless + 1 if held == before else 0
                if fruitless >= FRUITLESS_TRIES:
                    raise DownloadError(f"{file.name}: {held} of {file.size} bytes arrived: {error}") from error
                pause(PAUSES_S[min(fruitless, len(PAUSES_S) - 1)])
        os.fsync(stream.fileno())
    return hasher.hexdigest()


def _receive(
    target: int, held: int, hasher: _Hash, file: HubFile, url: str, *, headers: Mapping[str, str], progress: Progress
) -> int:
    """Bytes of one answer, from `held` on; how many are there then. Raises ConnectionError where it breaks off."""
    from huggingface_hub import errors, get_session, hf_raise_for_status

    asked = {**headers, "Range": f"bytes={held}-{file.size - 1}", "Accept-Encoding": "identity"}
    try:
        with get_session().stream("GET", url, headers=asked, timeout=SILENCE_S) as answer:
            hf_raise_for_status(answer)
            skip = 0 if answer.status_code == 206 else held  # a mirror that serves no ranges
            for block in answer.iter_raw(BLOCK_BYTES):
                fresh = block[skip:]
                skip -= len(block) - len(fresh)
                fresh = fresh[: file.size - held]
                _write(target, fresh)
                hasher.update(fresh)
                progress.fetched(len(fresh))
                held += len(fresh)
    except errors.HfHubHTTPError:
        raise
    except Exception as error:  # of the library below the client, whichever that is
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    if held < file.size:
        raise ConnectionError(f"the answer ended after {held} bytes")
    return held


def _write(target: int, block: bytes) -> None:
    """All of it, or an OSError: what was not written must not be hashed."""
    start = os.fstat(target).st_size
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(target, view) :]
    except OSError:
        os.ftruncate(target, start)
        raise


def _hash_file(path: Path, hasher: _Hash) -> int:
    """Feed a file to the hasher; its bytes."""
    count = 0
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            hasher.update(block)
            count += len(block)
    return count
