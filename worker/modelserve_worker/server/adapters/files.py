"""The two files of an adapter: what they are, by a digest of all their bytes, and whether they can change anything."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.adapters.binding import BoundAdapter, Factors, read_adapter
from modelserve.model.adapters.config import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PICKLED_FILE, PICKLED_NOT_READ
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.sizing.adapters import EXPERTS
from modelserve_worker.server.adapters.versions import AdapterFault, AdapterState

MOST_CONFIG_BYTES, MOST_FILE_BYTES = 16 << 20, 16 << 30
_PIECE = 4 << 20
_MAGNITUDES = {"F32": (np.uint32, 0x7FFFFFFF), "F16": (np.uint16, 0x7FFF), "BF16": (np.uint16, 0x7FFF)}
_SHOWN = 3


@dataclass(frozen=True)
class AdapterFiles:
    """`digest`: sha256:HEX over both files, which two names of one content share. `fault`: it can change nothing, or
    part of it cannot. `stamps` change as somebody writes to the files. `trained`: kind, layer and number among those
    stacked of matrices whose B is not zero; not of experts, of which a probe reaches few."""

    directory: Path
    digest: str
    nbytes: int
    rank: int
    fault: AdapterFault | None
    stamps: tuple[tuple[int, ...], ...]
    trained: frozenset[tuple[str, int | None, int]] = frozenset()

    def check_unchanged(self) -> None:
        """Raise AdapterFault where they are others by now than were looked at."""
        if tuple(_stamp((self.directory / name).stat()) for name in _NAMES) != self.stamps:
            raise AdapterFault(
                "FilesChanged", f"the files in {self.directory} changed while they were read", passing=True
            )


_NAMES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)


def look_at(directory: Path, architecture: ModelArchitecture, *, within: Path | None = None) -> AdapterFiles:
    """Read all of both files, in pieces, once for the digest and once for factors that are zero.

    `within`: where their real paths have to be. Raises AdapterFault.
    """
    try:
        digest, sizes, stamps = hashlib.sha256(), [], []
        _require_there(directory)
        for name, most in zip(_NAMES, (MOST_CONFIG_BYTES, MOST_FILE_BYTES), strict=True):
            size, stamp = _digest_file(directory / name, most, digest.update, within=within)
            sizes.append(size)
            stamps.append(stamp)
        bound = read_adapter(directory, architecture)
        live = [each for each in bound.factors if _any(each.b)]
        fault = _without_effect(bound, live)
        trained = frozenset(
            (each.module.linear.value, each.module.layer, part)
            for each in live
            for part, _ in each.module.parts
            if each.module.linear not in EXPERTS
        )
    except UnsupportedModel as error:
        raise AdapterFault("DoesNotBind", str(error)) from error
    except InvalidInput as error:
        raise AdapterFault("InvalidFiles", str(error)) from error
    except OSError as error:
        raise AdapterFault(
            "NotReadable", f"the adapter in {directory} cannot be read: {error}", passing=True
        ) from error
    return AdapterFiles(directory, f"sha256:{digest.hexdigest()}", sizes[1], bound.rank, fault, tuple(stamps), trained)


def _require_there(directory: Path) -> None:
    if not directory.is_dir():
        raise AdapterFault("NotFound", f"there is no directory {directory}", passing=True)
    for name in _NAMES:
        if not (directory / name).exists():
            pickled = name == ADAPTER_FILE and (directory / PICKLED_FILE).exists()
            told = f"; {PICKLED_NOT_READ}. Save it as safetensors" if pickled else ""
            raise AdapterFault("NotFound", f"{directory} holds no {name}{told}", passing=not pickled)


def _digest_file(
    path: Path, most: int, update: Callable[[bytes], None], *, within: Path | None
) -> tuple[int, tuple[int, ...]]:
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise AdapterFault("NotAllowed", f"{path} leads out of {within}: adapters lie below it")
    # Not to wait for a writer where it is a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AdapterFault("InvalidFiles", f"{path} is no file")
        if found.st_size > most:
            raise AdapterFault("TooLarge", f"{path} has {found.st_size} bytes; the limit is {most}")
        update(f"{path.name} {found.st_size}\n".encode())
        left = found.st_size
        while left and (piece := file.read(min(_PIECE, left))):
            update(piece)
            left -= len(piece)
        if left:
            raise AdapterFault("FilesChanged", f"{path} became shorter while it was read", passing=True)
    return found.st_size, _stamp(found)


def first_names(names: Sequence[str]) -> str:
    """Of many, for a message: the first few."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _without_effect(bound: BoundAdapter, trained: Sequence[Factors]) -> AdapterFault | None:
    """Terms scale * B A x that are zero whatever x is; of `trained` B is not."""
    live = [each.name for each in trained if each.scale]
    if not live:
        message = "B of every module is zero, as before training: it changes nothing. Train it, or save it anew"
        return AdapterFault("FactorsAreZero", message, state=AdapterState.NO_EFFECT)
    dead = [each.name for each in trained if not _any(each.a)]
    if len(dead) == len(live):
        message = "A of every module is zero: it changes nothing"
        return AdapterFault("FactorsAreZero", message, state=AdapterState.NO_EFFECT)
    idle = [each.name for each in bound.without_effect if _any(each.b)]
    for names, why in ((dead, "have an A of zeros beside a trained B"), (idle, "are of layers that read another's")):
        if names:
            message = f"{len(names)} modules {why}, and change nothing: {first_names(names)}"
            return AdapterFault("ModulesWithoutEffect", message, state=AdapterState.PARTLY_NO_EFFECT)
    return None


def _any(entry: TensorEntry) -> bool:
    """Whether an element is not zero, of either sign."""
    kind, magnitude = _MAGNITUDES[entry.dtype]
    return any(bool((np.frombuffer(piece, dtype=kind) & magnitude).any()) for piece in _pieces(entry))


def _pieces(entry: TensorEntry) -> Iterator[bytes]:
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        left = entry.end - entry.start
        while left and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece
