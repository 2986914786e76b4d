"""Reading the safetensors files of a checkpoint directory: names and shapes first, then rows on demand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.termination import TerminationReason

INDEX = "model.safetensors.index.json"
LONGEST_HEADER_BYTES = 100_000_000  # limit of the safetensors format
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


class InvalidCheckpoint(InvalidInput):
    """A checkpoint file is missing, broken, or does not match its config.json; the text names tensor and file."""

    reason = TerminationReason.InvalidCheckpoint


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Header entry of one tensor. `dtype` is the safetensors name (BF16, F32, ...)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Raises InvalidCheckpoint for anything but plain floating point: quantised weights are not served."""
        if self.dtype not in FLOAT_BYTES:
            raise InvalidCheckpoint(
                f"{self.file}: tensor {self.name!r} has dtype {self.dtype}; this release loads "
                f"{', '.join(FLOAT_BYTES)}: use an unquantised checkpoint"
            )
        return FLOAT_BYTES[self.dtype]


class CheckpointFiles:
    """The tensors of a directory. Files are memory-mapped; only rows that are read become resident.

    Raises InvalidCheckpoint when there are no files, when one is broken or absent, or when the index does not match.
    """

    def __init__(self, directory: Path, *, opening: Callable[[Path], None]) -> None:
        """`opening` is told of each file before its header is read."""
        self.directory = directory
        self.tensors: Mapping[str, CheckpointTensor] = _scan(directory, opening)
        self._open: tuple[Path, Any] | None = None

    def read(self, tensor: CheckpointTensor, *, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of the first dimension, on the CPU, in the file's dtype, mapped."""
        try:
            if self._open is None or self._open[0] != tensor.file:
                self._open = (tensor.file, safe_open(tensor.file, framework="pt"))
            rows: Tensor = self._open[1].get_slice(tensor.name)[start : start + count]
            return rows
        except (OSError, SafetensorError) as error:
            raise InvalidCheckpoint(f"{tensor.file}: tensor {tensor.name!r} cannot be read: {error}") from error


def _scan(directory: Path, opening: Callable[[Path], None]) -> dict[str, CheckpointTensor]:
    index = _index(directory)
    files = sorted({directory / name for name in index.values()}) if index else sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidCheckpoint(f"{directory} holds no *.safetensors file: download the checkpoint or correct the path")
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        opening(file)
        for tensor in _header(file):
            if index and index.get(tensor.name) != file.name:
                continue  # a stale shard beside the indexed ones, or a tensor that the index takes from another file
            if tensor.name in tensors:
                raise InvalidCheckpoint(
                    f"tensor {tensor.name!r} is both in {tensors[tensor.name].file} and in {file}: remove one of them"
                )
            tensors[tensor.name] = tensor
    for name, file_name in index.items():
        if name not in tensors:
            raise InvalidCheckpoint(f"{directory / file_name} lacks tensor {name!r}, which {INDEX} lists in it")
    return tensors


def _index(directory: Path) -> dict[str, str]:
    """Tensor name -> file name; empty when the directory has no index."""
    path = directory / INDEX
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        index = {str(name): str(file) for name, file in weight_map.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{path} is not a safetensors index: {error!r}") from error
    outside = [file for file in index.values() if Path(file).name != file]
    if outside:
        raise InvalidCheckpoint(f"{path} names {outside[0]!r}; files must lie beside the index")
    return index


def _header(file: Path) -> list[CheckpointTensor]:
    """Tensors in the order in which they lie in the file."""
    try:
        _read_ahead(file)
        with safe_open(file, framework="pt") as opened:
            tensors = []
            for name in opened.offset_keys():
                entry = opened.get_slice(name)
                tensors.append(CheckpointTensor(name, file, tuple(entry.get_shape()), entry.get_dtype()))
            return tensors
    except (OSError, SafetensorError) as error:
        raise InvalidCheckpoint(f"{file} is not a readable safetensors file: {error}: download it again") from error


def _read_ahead(file: Path) -> None:
    """Bring the header into the page cache: safe_open would hold the interpreter's lock while storage is slow."""
    with file.open("rb") as stream:
        stream.read(min(int.from_bytes(stream.read(8), "little"), LONGEST_HEADER_BYTES))
