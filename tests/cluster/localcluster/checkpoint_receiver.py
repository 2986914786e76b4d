"""The far end of checkpoint_upload: its text runs in a pod as `python -c TEXT FOLDER [HASH]`.

With FOLDER alone it prints the hash of what lies there. With HASH it reads a tar stream from standard input into
FOLDER, which changes only once all of it has arrived. Standard library only: nothing of the repository is there.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO


def files(folder: Path) -> list[Path]:
    """The files of a checkpoint, or of adapters in folders of their own; none when `folder` does not exist."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def content_hash(folder: Path) -> str:
    """SHA-256, in hex, of the names, below `folder`, and contents of its files."""
    digest = hashlib.sha256()
    for path in files(folder):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\0".encode())
    return digest.hexdigest()


def receive(folder: Path, expected: str, stream: BinaryIO) -> None:
    """Replace `folder` by the files of a tar stream. Exits with a message when their hash is not `expected`."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(partial, filter="data")
    if (arrived := content_hash(partial)) != expected:
        sys.exit(f"{partial} has hash {arrived}, and {expected} was sent: the stream was cut or changed; send it again")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if len(sys.argv) == 2:
        print(content_hash(target))
    else:
        receive(target, sys.argv[2], sys.stdin.buffer)
