"""Files of compiled code that outlive the process: written whole, and believed only where they are what was written.

What lies in a cache is run. So a file is read where nobody but root, this user and members of this process's groups
(a pod's fsGroup is one of them: pods of other users share a volume through it) could have written it, and where a
digest of its content is right: a node that loses power leaves files that are short, or full of zeros. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import uuid
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755  # less umask; others never write

logger = logging.getLogger(__name__)

_told: set[str] = set()  # who polls says it once


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed(data: bytes) -> bytes:
    """With a digest at the end, where loaders of ELF files do not look."""
    return data + hashlib.sha256(data).digest()


def unsealed(content: bytes) -> bytes | None:
    """What was sealed; None where that is not what is there."""
    data, seal = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return data if data and hashlib.sha256(data).digest() == seal else None


def distrust(status: os.stat_result) -> str | None:
    """Why what lies there is not run: who could have written it; None where these are trusted."""
    ours = {os.getegid(), *os.getgroups()}
    mode, user, group = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    if mode & stat.S_IWOTH:
        return f"anybody may write it (mode {mode:04o})"
    if user not in (0, os.geteuid()) and group not in ours:
        return (
            f"it is of user {user} and group {group}, and this process is user {os.geteuid()} of groups {sorted(ours)}"
        )
    if mode & stat.S_IWGRP and group not in ours:
        return f"members of group {group} may write it (mode {mode:04o}), and this process is of groups {sorted(ours)}"
    return None


def trusted_bytes(path: Path, *, shipped: bool = False) -> bytes | None:
    """What the file has; None where there is none, it cannot be read, or somebody who is not trusted could write it.
    What was `shipped` with the program is trusted as that is."""
    try:
        with path.open("rb") as file:
            reason = None if shipped else distrust(os.fstat(file.fileno()))
            if reason is None:
                return file.read()
    except OSError:
        return None
    tell(f"{path} is not used: {reason}")
    return None


def write_whole(path: Path, data: bytes) -> None:
    """There is all of it or what was there before, also when the node loses power. Raises OSError."""
    make_folder(path.parent)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)  # another process may write the same
    except OSError:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems know no such thing
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def make_folder(folder: Path) -> None:
    """Where it is missing; the group may write where it may write the one above. Raises OSError."""
    if folder.is_dir():
        return
    folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
    above = folder.parent.stat()
    shared = above.st_mode & stat.S_IWGRP and not above.st_mode & stat.S_IWOTH
    if shared and folder.stat().st_gid == above.st_gid:
        with contextlib.suppress(OSError):
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IWGRP)


def tell(text: str) -> None:
    """Warn, once."""
    if text not in _told:
        _told.add(text)
        logger.warning(text)
