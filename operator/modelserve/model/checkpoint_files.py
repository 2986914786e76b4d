"""The files of a checkpoint directory: JSON documents, the safetensors index, and the headers of safetensors files.

A safetensors file starts with the length of its header (8 bytes, little endian) and the header itself: JSON that maps
each tensor to its dtype, shape and byte range behind the header. No tensor is read here.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserve.errors import InvalidInput

DOWNLOAD_LOCK, DOWNLOAD_MARKER = ".modelserve-fetch.lock", ".modelserve-fetched.json"  # the latter: it is complete
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # limit of the format
LENGTH_BYTES = 8
MAX_DOCUMENT_BYTES = 64 << 20  # of a JSON file beside the weights: published ones have a few MB at most


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes [start, end) of its file. `dtype` is the safetensors name (BF16, F32, ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises InvalidInput, with the path, when it is missing or anything else."""
    try:
        if (size := path.stat().st_size) > MAX_DOCUMENT_BYTES:
            raise InvalidInput(f"{path} has {size} bytes; {MAX_DOCUMENT_BYTES} are read at most: download it again")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; give a checkpoint directory") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read: it is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} must hold a JSON object, not {type(document).__name__}")
    return document


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json; empty where there is none. Raises InvalidInput that names the file."""
    path = directory / GENERATION_FILE
    return read_json_object(path) if path.is_file() else {}


def read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> name of its file; empty when the directory has no index. Raises InvalidInput."""
    path = directory / INDEX_FILE
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput(f"{path} has no weight_map: download it again")
    index = {str(name): str(file) for name, file in weight_map.items()}
    outside = next((file for file in index.values() if Path(file).name != file), None)
    if outside is not None:
        raise InvalidInput(f"{path} names {outside!r}; files must lie beside the index")
    return index


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, sorted: those that the index names, or all where there is none.

    Raises InvalidInput when there is none, or one that the index names is absent.
    """
    index = read_index(directory)
    files = sorted({directory / name for name in index.values()} or directory.glob("*.safetensors"))
    if not files:
        raise InvalidInput(f"{directory} holds no *.safetensors file: download the checkpoint or correct the path")
    missing = [path.name for path in files if index and not path.exists()]
    if missing:
        raise InvalidInput(f"{INDEX_FILE} names {missing[0]}, which is not in {directory} ({len(missing)} missing)")
    return files


def read_header(path: Path) -> list[TensorEntry]:
    """Tensors of one file in the order in which they lie there, each checked to lie inside it. Raises InvalidInput."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise InvalidInput(
                    f"{path} is not a safetensors file: its header would take {length} bytes of the file's {size}: "
                    "download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: the safetensors header is not JSON: {error}: download it again") from error
    if not isinstance(header, dict):
        raise InvalidInput(f"{path}: the safetensors header is not an object: download it again")
    data = LENGTH_BYTES + length
    entries = [
        _entry(entry, name=name, file=path, data=data, size=size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: entry.start)
    for one, other in itertools.pairwise(entry for entry in entries if entry.end > entry.start):
        if other.start < one.end:
            raise InvalidInput(
                f"{path}: tensors {one.name!r} and {other.name!r} overlap, at bytes {one.start} to {one.end} and "
                f"{other.start} to {other.end}: download it again"
            )
    return entries


def _entry(entry: object, *, name: str, file: Path, data: int, size: int) -> TensorEntry:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    lengths = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
    spans = isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)
    if not (isinstance(dtype, str) and lengths and spans):
        raise InvalidInput(f"{file}: the header entry of {name!r} lacks dtype, shape or data_offsets")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    start, end = (data + offset for offset in offsets)
    if not data <= start <= end:
        raise InvalidInput(f"{file}: the header gives tensor {name!r} the data_offsets {offsets}: download it again")
    if end > size:
        raise InvalidInput(
            f"{file} is cut short: tensor {name!r} lies at bytes {start} to {end}, the file has {size}: "
            "download it again"
        )
    return TensorEntry(name, file, dtype, tuple(shape), start, end)
