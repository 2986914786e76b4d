"""Which GGUF files of a checkpoint hold the model, and the headers of all its parts together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from modelserve.errors import InvalidInput
from modelserve.model.gguf.header import GgufHeader, GgufTensor, ReadBytes, Value, read_gguf_header

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PROJECTOR = re.compile(r"(?:^|[-_.])mmproj(?:[-_.]|$)")  # an image or audio tower, which text needs none of
LISTED = 5  # names in a message


@dataclass(frozen=True, eq=False)  # each is itself: what is read of it is kept with it
class GgufCheckpoint:
    """All parts of one model. `metadata` is the first part's, which has it all."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, tuple[Path, GgufTensor]]

    @property
    def first(self) -> Path:
        return self.files[0]


def read_gguf(checkpoint: Path) -> GgufCheckpoint | None:
    """The GGUF model in a directory, or the one that a path names; None where safetensors or nothing is there.

    Raises InvalidInput for a broken file, one of several models without a name, and parts that are missing or of
    different models. What was read is kept until a file changes.
    """
    files = gguf_files(checkpoint)
    if not files:
        return None
    return _read(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


def gguf_files(checkpoint: Path) -> tuple[Path, ...]:
    """The parts of the model in a directory (or one folder below, where repositories keep large ones), or of the model
    that a path to a file names. Empty where there is none, or where safetensors are there, too."""
    if checkpoint.suffix == SUFFIX and checkpoint.is_file():
        folder, names = checkpoint.parent, [checkpoint.name]
        part = _PART.fullmatch(checkpoint.name)
        if part:
            names = [path.name for path in folder.glob(f"*-of-{part['count']}{SUFFIX}")]
            names = [name for name in names if name.startswith(f"{part['stem']}-")]
    elif any(checkpoint.glob("*.safetensors")):
        return ()
    else:
        found = [*checkpoint.glob(f"*{SUFFIX}")] or [*checkpoint.glob(f"*/*{SUFFIX}")]
        folder, names = checkpoint, [str(path.relative_to(checkpoint)) for path in found]
    models = models_of(names)
    if len(models) > 1:
        raise InvalidInput(
            f"{checkpoint} holds {len(models)} GGUF models ({listed(models)}): name one, as PATH/FILE.gguf",
            field="model.uri",
        )
    return tuple(folder / name for parts in models.values() for name in whole(parts))


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Model -> the files that hold it, in order; names of image and audio towers (`mmproj`) are left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.endswith(SUFFIX) or _PROJECTOR.search(name.rpartition("/")[2].removesuffix(SUFFIX).lower()):
            continue
        part = _PART.fullmatch(name)
        models.setdefault(f"{part['stem']} of {part['count']}" if part else name, []).append(name)
    return models


def whole(parts: list[str]) -> list[str]:
    """The files of one model. Raises InvalidInput where parts of it are missing."""
    found = [part for name in parts if (part := _PART.fullmatch(name))]
    if found and [int(part["number"]) for part in found] != [*range(1, int(found[0]["count"]) + 1)]:
        only = ", ".join(parts[:LISTED])
        raise InvalidInput(
            f"of {int(found[0]['count'])} parts of a GGUF model only {only} are there: fetch all of them"
        )
    return parts


def listed(models: Mapping[str, Sequence[str]]) -> str:
    """First file of each model, a few of them."""
    names = [parts[0] for parts in models.values()]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def reading(path: Path) -> ReadBytes:
    """Positioned reads of a file, which is opened for each: headers are read a megabyte at a time."""

    def read(start: int, count: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count, start)

    return read


@lru_cache(maxsize=4)  # a start asks for the geometry, the format and the tokenizer of one model
def _read(files: tuple[tuple[Path, int, int], ...]) -> GgufCheckpoint:
    headers: list[tuple[Path, GgufHeader]] = []
    for path, size, _ in files:
        try:
            headers.append((path, read_gguf_header(reading(path), size=size, name=str(path))))
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    tensors: dict[str, tuple[Path, GgufTensor]] = {}
    for number, (path, header) in enumerate(headers):
        stated = header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1
        if stated != (number, len(headers)):
            raise InvalidInput(
                f"{path} says that it is part {stated[0]} (from 0) of {stated[1]}; it is taken for part {number} of "
                f"{len(headers)}: use the parts of one model, under the names that they were published with"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise InvalidInput(f"tensor {name!r} is both in {tensors[name][0]} and in {path}: remove one of them")
            tensors[name] = path, tensor
    metadata = headers[0][1].metadata
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise InvalidInput(f"{headers[0][0]} states {total} tensors; its {len(headers)} parts hold {len(tensors)}")
    return GgufCheckpoint(tuple(path for path, _ in headers), metadata, tensors)
