"""Reads from headers what the safetensors files of a checkpoint directory hold, and where, before a tensor is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelserve.errors import InvalidInput
from modelserve.model.checkpoint_files import INDEX_FILE, TensorEntry, read_header, read_index, weight_files
from modelserve.model.gguf.files import GgufCheckpoint, read_gguf
from modelserve.termination import TerminationReason
from modelserve_worker.weights.gguf_blocks import BLOCKS_BY_NAME

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class InvalidCheckpoint(InvalidInput):
    """A checkpoint file is missing, broken, or does not match its config.json; the text names tensor and file."""

    reason = TerminationReason.InvalidCheckpoint


def stored_dtype(tensor: TensorEntry, accepted: Sequence[str]) -> torch.dtype:
    """Raises InvalidCheckpoint for a dtype that is not one of those accepted (safetensors names) for this tensor, and
    where the tensor's bytes are not those of its shape."""
    if tensor.dtype not in accepted:
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}; the weights that config.json states have "
            f"{' or '.join(accepted)} there: use the checkpoint's own config.json, or an unquantised checkpoint"
        )
    kind = BLOCKS_BY_NAME.get(tensor.dtype)  # whose bytes are told apart later
    dtype = torch.uint8 if kind is not None else DTYPES[tensor.dtype]
    elements, held = math.prod(tensor.shape), tensor.end - tensor.start
    needed = elements * dtype.itemsize if kind is None else elements // kind.elements * kind.bytes
    if needed != held:
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name!r} lies at bytes {tensor.start} to {tensor.end}, which are {held}; "
            f"{tensor.dtype} of shape {list(tensor.shape)} needs {needed}: download it again"
        )
    return dtype


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors of a directory by name, in file order."""

    directory: Path
    tensors: Mapping[str, TensorEntry]
    gguf: bool = False  # they have llama.cpp's names

    @classmethod
    def scan(cls, directory: Path, *, opening: Callable[[Path], None]) -> CheckpointFiles:
        """Read all headers; `opening` is told of each file before.

        Raises InvalidCheckpoint when there are no files, when one is broken or absent, or the index does not match.
        """
        try:
            gguf = read_gguf(directory)
            if gguf is not None:
                return cls(directory, _entries(gguf), gguf=True)
            return cls(directory, _scan(directory, opening))
        except InvalidCheckpoint:
            raise
        except InvalidInput as error:
            raise InvalidCheckpoint(str(error)) from error


def _entries(gguf: GgufCheckpoint) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, path, tensor.type.name, tensor.shape, tensor.start, tensor.end)
        for name, (path, tensor) in gguf.tensors.items()
    }


def _scan(directory: Path, opening: Callable[[Path], None]) -> dict[str, TensorEntry]:
    index = read_index(directory)
    tensors: dict[str, TensorEntry] = {}
    for file in weight_files(directory):
        opening(file)
        for tensor in read_header(file):
            if index and index.get(tensor.name) != file.name:
                continue  # a stale shard beside the indexed ones, or a tensor that the index takes from another file
            if tensor.name in tensors:
                raise InvalidCheckpoint(
                    f"tensor {tensor.name!r} is both in {tensors[tensor.name].file} and in {file}: remove one of them"
                )
            tensors[tensor.name] = tensor
    for name, file_name in index.items():
        if name not in tensors:
            raise InvalidCheckpoint(f"{directory / file_name} lacks tensor {name!r}, which {INDEX_FILE} lists in it")
    return tensors
