"""Facts of a checkpoint directory, from config.json and the headers of its safetensors files; no tensor is read.

A safetensors file starts with the length of its header (8 bytes, little endian) and the header itself: JSON that maps
each tensor to its dtype, shape and byte range behind the header.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model_facts import ModelFacts
from modelserve.weight_format import WeightFormat, quantised_format

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
EMBEDDING_SUFFIX = "embed_tokens.weight"
_LENGTH_BYTES = 8
_FORMATS = {"BF16": WeightFormat.BFLOAT16, "F32": WeightFormat.FLOAT32}
_QUANTISED_DTYPES = {WeightFormat.INT4_G32: "I32", WeightFormat.FP8_CHANNEL: "F8_E4M3"}  # of the packed weights
_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def read_architecture(directory: Path, *, servable_only: bool = False) -> ModelArchitecture:
    """Geometry from `directory`/config.json, by default of formats that are only planned for too.

    Raises InvalidInput or UnsupportedModel.
    """
    return ModelArchitecture.from_config(read_json_object(directory / CONFIG_FILE), servable_only=servable_only)


def read_weight_format(directory: Path) -> WeightFormat:
    """Storage format as `directory`/config.json states it. Raises InvalidInput or UnsupportedModel."""
    config = read_json_object(directory / CONFIG_FILE)
    stated = quantised_format(config)
    return stated or WeightFormat(ModelArchitecture.from_config(config).dtype)


def inspect_checkpoint(directory: Path) -> ModelFacts:
    """Facts of a whole checkpoint.

    Raises InvalidInput for missing, broken or contradicting files, UnsupportedModel for another model or weight format.
    """
    architecture = read_architecture(directory)
    files = _weight_files(directory)
    tensors: dict[str, Mapping[str, Any]] = {}
    for path in files:
        tensors.update(_read_header(path))
    _check_embedding(tensors, architecture)
    return ModelFacts(
        architecture=architecture,
        weight_bytes=sum(path.stat().st_size for path in files),
        format=_storage_format(tensors, quantised_format(read_json_object(directory / CONFIG_FILE))),
    )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise InvalidInput(f"{directory} holds no safetensors file")
        return found
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput(f"{INDEX_FILE} has no weight_map")
    files = [directory / str(name) for name in sorted({str(name) for name in weight_map.values()})]
    missing = [path.name for path in files if path.parent != directory or not path.is_file()]
    if missing:
        raise InvalidInput(f"{INDEX_FILE} names {missing[0]}, which is not in {directory} ({len(missing)} missing)")
    return files


def _read_header(path: Path) -> dict[str, Mapping[str, Any]]:
    """Tensor entries of one file, each checked to lie inside it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise InvalidInput(
                f"{path.name} is not a safetensors file: its header would take {length} bytes of the file's {size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path.name}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidInput(f"{path.name}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(entry, name=name, file=path.name, data_bytes=size - _LENGTH_BYTES - length)
    return header


def _check_entry(entry: object, *, name: str, file: str, data_bytes: int) -> None:
    valid = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not valid or not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(o, int) for o in offsets):
        raise InvalidInput(f"{file}: the header entry of {name} lacks dtype, shape or data_offsets")
    if not 0 <= offsets[0] <= offsets[1] <= data_bytes:
        raise InvalidInput(f"{file} is cut short: {name} ends at byte {offsets[1]} of {data_bytes}")


def _check_embedding(tensors: Mapping[str, Mapping[str, Any]], architecture: ModelArchitecture) -> None:
    """The one tensor that every checkpoint has; its shape tells a config.json of another checkpoint."""
    found = next((name for name in tensors if name.endswith(EMBEDDING_SUFFIX)), None)
    if found is None:
        raise InvalidInput(f"the safetensors files hold no tensor *.{EMBEDDING_SUFFIX}")
    expected = [architecture.vocab_size, architecture.hidden_size]
    if tensors[found]["shape"] != expected:
        raise InvalidInput(f"{found} has shape {tensors[found]['shape']}; {CONFIG_FILE} says {expected}")


def _storage_format(tensors: Mapping[str, Mapping[str, Any]], stated: WeightFormat | None) -> WeightFormat:
    """The dtype that most bytes of the text tensors have; a quantised checkpoint must hold what its config states."""
    held: Counter[str] = Counter()
    for name, entry in tensors.items():
        if not any(tower in name for tower in _TOWERS):
            held[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    if stated is not None:
        packed = _QUANTISED_DTYPES[stated]
        if not held[packed]:
            raise InvalidInput(f"{CONFIG_FILE} states {stated} weights, but the files hold no {packed} tensor")
        return stated
    dtype = held.most_common(1)[0][0]
    if dtype not in _FORMATS:
        raise UnsupportedModel(f"the weights are stored as {dtype}; this release serves {', '.join(_FORMATS)}")
    return _FORMATS[dtype]


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises InvalidInput, with the path, when it is missing or anything else."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; give a checkpoint directory") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read: it is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} must hold a JSON object, not {type(document).__name__}")
    return document
