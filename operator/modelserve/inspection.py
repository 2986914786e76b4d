"""Facts of a checkpoint directory, from config.json and the headers of its safetensors files; no tensor is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from modelserve.architecture import ModelArchitecture
from modelserve.checkpoint_files import CONFIG_FILE, TensorEntry, read_header, read_json_object, weight_files
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model_facts import ModelFacts
from modelserve.weight_format import WeightFormat, quantised_format

EMBEDDING_SUFFIX = "embed_tokens.weight"
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
    files = weight_files(directory)
    tensors = {entry.name: entry for path in files for entry in read_header(path)}
    _check_embedding(tensors, architecture)
    return ModelFacts(
        architecture=architecture,
        weight_bytes=sum(path.stat().st_size for path in files),
        format=_storage_format(tensors, quantised_format(read_json_object(directory / CONFIG_FILE))),
    )


def _check_embedding(tensors: dict[str, TensorEntry], architecture: ModelArchitecture) -> None:
    """The one tensor that every checkpoint has; its shape tells a config.json of another checkpoint."""
    found = next((name for name in tensors if name.endswith(EMBEDDING_SUFFIX)), None)
    if found is None:
        raise InvalidInput(f"the safetensors files hold no tensor *.{EMBEDDING_SUFFIX}")
    expected = [architecture.vocab_size, architecture.hidden_size]
    if list(tensors[found].shape) != expected:
        raise InvalidInput(f"{found} has shape {list(tensors[found].shape)}; {CONFIG_FILE} says {expected}")


def _storage_format(tensors: dict[str, TensorEntry], stated: WeightFormat | None) -> WeightFormat:
    """The dtype that most bytes of the text tensors have; a quantised checkpoint must hold what its config states."""
    held: Counter[str] = Counter()
    for name, entry in tensors.items():
        if not any(tower in name for tower in _TOWERS):
            held[entry.dtype] += entry.end - entry.start
    if stated is not None:
        packed = _QUANTISED_DTYPES[stated]
        if not held[packed]:
            raise InvalidInput(f"{CONFIG_FILE} states {stated} weights, but the files hold no {packed} tensor")
        return stated
    dtype = held.most_common(1)[0][0]
    if dtype not in _FORMATS:
        raise UnsupportedModel(f"the weights are stored as {dtype}; this release serves {', '.join(_FORMATS)}")
    return _FORMATS[dtype]
