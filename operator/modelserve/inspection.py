"""Facts of a checkpoint directory, from config.json and the headers of its safetensors files, or from the header of its
GGUF file; no tensor is read but the few numbers of a GGUF file that say how much of a head is rotated."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.checkpoint_files import (
    CONFIG_FILE,
    INDEX_FILE,
    TensorEntry,
    read_header,
    read_json_object,
    weight_files,
)
from modelserve.model.drafters.reading import DrafterArchitecture, drafter_architecture, drafters_problem
from modelserve.model.gguf.files import read_gguf
from modelserve.model.gguf.geometry import gguf_architecture
from modelserve.model.gguf.weight_format import gguf_weight_format, rounded_once_more
from modelserve.model.images import ImageArchitecture
from modelserve.model.media_files import AUDIO_PREFIXES, IMAGE_PREFIXES, holds
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.model.quantization.config import read_config, stated_format, unused_parts
from modelserve.model.quantization.files import as_files_hold
from modelserve.model.weight_format import BFLOAT16, FLOAT32, StoredType, WeightFormat, dense_format
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.rank_settings import RankSettings
from modelserve.sizing.speculation import Speculation

EMBEDDING_SUFFIX = "embed_tokens.weight"
_FORMATS = {"BF16": BFLOAT16, "F32": FLOAT32}
_QUANTISED_DTYPES = {  # of the packed weights
    StoredType.INT4: ("I32",),
    StoredType.INT8: ("I8", "I32"),
    StoredType.FP8: ("F8_E4M3",),
    StoredType.NVFP4: ("U8",),
}
_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def read_architecture(directory: Path) -> ModelArchitecture:
    """Geometry from `directory`/config.json, or from its GGUF file. Raises InvalidInput or UnsupportedModel."""
    if (gguf := read_gguf(directory)) is not None:
        return gguf_architecture(gguf)
    return ModelArchitecture.from_config(read_json_object(directory / CONFIG_FILE))


def read_assistant(directory: Path) -> AssistantArchitecture:
    """Geometry of an MTP assistant from `directory`/config.json. Raises InvalidInput or UnsupportedModel."""
    return AssistantArchitecture.from_config(read_json_object(directory / CONFIG_FILE))


def read_drafter(directory: Path) -> DrafterArchitecture:
    """Geometry of a drafter from `directory`/config.json. Raises InvalidInput or UnsupportedModel."""
    return drafter_architecture(read_json_object(directory / CONFIG_FILE))


def inspect_assistant(directory: Path) -> AssistantFacts:
    """Facts of a drafter. Raises InvalidInput for missing, broken or contradicting files, UnsupportedModel for another
    model."""
    drafter, files = read_drafter(directory), weight_files(directory)
    entries = {entry.name: entry for path in files for entry in read_header(path)}
    if isinstance(drafter, AssistantArchitecture):
        _check_embedding(entries, drafter)
    return AssistantFacts(assistant=drafter, weight_bytes=sum(path.stat().st_size for path in files))


def read_drafters(args: EngineArgs) -> tuple[tuple[Path, DrafterArchitecture], ...]:
    """Directories and geometries of a worker's drafters, in the order in which it has them: an assistant before what
    drafts blocks. Raises InvalidInput for two of a kind, and as `read_drafter`."""
    found = [(Path(each), read_drafter(Path(each))) for each in args.drafters]
    if problem := drafters_problem([(str(path), drafter) for path, drafter in found]):
        raise InvalidInput(f"drafter: {problem}", field="drafter")
    return tuple(sorted(found, key=lambda each: not isinstance(each[1], AssistantArchitecture)))


def read_speculation(args: EngineArgs, architecture: ModelArchitecture) -> Speculation:
    """What proposes tokens to a worker's model of this `architecture`, with the geometry of its drafters, which compute
    in the model's dtype. Raises InvalidInput or UnsupportedModel."""
    speculation = args.speculative
    for _, read in read_drafters(args):
        drafter = read.model_copy(update={"dtype": architecture.dtype})
        speculation = speculation.with_drafter(drafter, as_many_as_pay=args.num_speculative_tokens == "auto")
    return speculation


def read_image_architecture(directory: Path) -> ImageArchitecture | None:
    """How the model in a directory sees; None where this release takes no images with it."""
    return None if read_gguf(directory) is not None else ImageArchitecture.found(read_config(directory))


def read_images(args: EngineArgs) -> ImageInput | None:
    """Room for images of a worker with `args`; None: it takes none. Raises UnsupportedModel for a checkpoint that this
    release takes no images with, InvalidInput for settings that they do not fit."""
    if not args.images_per_request:
        return None
    directory = Path(args.model)
    if read_gguf(directory) is not None:
        raise UnsupportedModel("a GGUF file holds the text model alone; serve images from safetensors, or take none")
    architecture = ImageArchitecture.from_config(read_json_object(directory / CONFIG_FILE))
    problem = architecture.problem(
        max_soft_tokens=args.max_soft_tokens, max_num_batched_tokens=args.max_num_batched_tokens
    )
    if problem is not None:
        raise InvalidInput(f"maxSoftTokens: {problem}", field="maxSoftTokens")
    return ImageInput(args.images_per_request, args.max_soft_tokens, architecture, tuple(args.image_urls or ()))


def read_audio_architecture(directory: Path) -> AudioArchitecture | None:
    """How the model in a directory hears; None where this release takes no sounds with it."""
    return None if read_gguf(directory) is not None else AudioArchitecture.found(read_config(directory))


def read_audio(args: EngineArgs) -> AudioInput | None:
    """Room for sounds of a worker with `args`; None: it takes none. Raises UnsupportedModel for a checkpoint that hears
    nothing here, InvalidInput for settings that it does not fit."""
    if not args.audio_per_request:
        return None
    directory = Path(args.model)
    if read_gguf(directory) is not None:
        raise UnsupportedModel("a GGUF file holds the text model alone; serve audio from safetensors, or take none")
    architecture = AudioArchitecture.from_config(read_json_object(directory / CONFIG_FILE))
    if (problem := architecture.problem(args.audio_seconds)) is not None:
        raise InvalidInput(f"audioSeconds: {problem}", field="audioSeconds")
    return AudioInput(args.audio_per_request, args.audio_seconds, architecture)


def read_rank_settings(
    args: EngineArgs,
    architecture: ModelArchitecture,
    geometry: CacheGeometry,
    *,
    weight_format: WeightFormat | None,
    on_cpu: bool,
    capability: int | None = None,
) -> RankSettings:
    """What a rank of a worker with `args` is sized by, `capability` that of its GPU. Raises as `read_speculation`."""
    return RankSettings(
        tensor_parallel_size=args.tensor_parallel_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        kv_dtype=geometry.dtype,
        kv_layout=geometry.layout,
        on_cpu=on_cpu,
        weight_format=weight_format,
        speculation=read_speculation(args, architecture),
        profile=args.profile,
        capability=capability,
        adapters=args.adapters,
        images=read_images(args),
        audio=read_audio(args),
    )


def read_weight_format(directory: Path) -> WeightFormat:
    """Storage format as `directory`/config.json states it, or as its GGUF file has it.

    Raises InvalidInput or UnsupportedModel.

    Where there are weight files, their headers say what of it the config does not (`quantization.files`).
    """
    if (gguf := read_gguf(directory)) is not None:
        return gguf_weight_format(gguf, gguf_architecture(gguf))
    config = read_config(directory)
    architecture = ModelArchitecture.from_config(config)
    stated = stated_format(config, architecture)
    if stated is None:
        return dense_format(architecture.dtype)
    if not any(directory.glob("*.safetensors")):
        return stated
    return as_files_hold(
        stated, architecture, (entry for path in weight_files(directory) for entry in read_header(path))
    )


def read_unused_parts(directory: Path, stored: WeightFormat) -> tuple[str, ...]:
    """What of a checkpoint's quantisation, read as `stored`, is not used as it is stated or stored, a sentence each.
    Raises as above."""
    if (gguf := read_gguf(directory)) is not None:
        return rounded_once_more(gguf, stored)
    return tuple(unused_parts(read_config(directory), stored))


def inspect_checkpoint(directory: Path) -> ModelFacts:
    """Facts of a whole checkpoint.

    Raises InvalidInput for missing, broken or contradicting files, UnsupportedModel for another model or weight format.
    """
    if (gguf := read_gguf(directory)) is not None:
        architecture = gguf_architecture(gguf)
        stored = gguf_weight_format(gguf, architecture)
        return ModelFacts(
            architecture=architecture,
            weight_bytes=sum(path.stat().st_size for path in gguf.files),
            format=stored,
            unused=rounded_once_more(gguf, stored),
            identity=_identity(directory, list(gguf.files)),
        )
    config = read_config(directory)
    architecture = ModelArchitecture.from_config(config)
    stated = stated_format(config, architecture)
    files = weight_files(directory)
    tensors = {entry.name: entry for path in files for entry in read_header(path)}
    _check_embedding(tensors, architecture)
    stored = _storage_format(architecture, tensors, stated)
    return ModelFacts(
        architecture=architecture,
        weight_bytes=sum(path.stat().st_size for path in files),
        format=stored,
        images=ImageArchitecture.found(config) if holds(tensors.values(), IMAGE_PREFIXES) else None,
        audio=AudioArchitecture.found(config) if holds(tensors.values(), AUDIO_PREFIXES) else None,
        unused=tuple(unused_parts(config, stored)),
        identity=_identity(directory, files),
    )


def _identity(directory: Path, files: list[Path]) -> str:
    """SHA-256 over the index, where there is one, and the names and sizes of the files: no weight is read."""
    index = directory / INDEX_FILE
    digest = hashlib.sha256(index.read_bytes() if index.exists() else b"")
    for path in files:
        digest.update(f"\n{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def _check_embedding(tensors: dict[str, TensorEntry], architecture: ModelArchitecture) -> None:
    """The one tensor that every checkpoint has; its shape tells a config.json of another checkpoint."""
    found = next((name for name in tensors if name.endswith(EMBEDDING_SUFFIX)), None)
    if found is None:
        raise InvalidInput(f"the safetensors files hold no tensor *.{EMBEDDING_SUFFIX}")
    expected = [architecture.vocab_size, architecture.hidden_size]
    if list(tensors[found].shape) != expected:
        raise InvalidInput(f"{found} has shape {list(tensors[found].shape)}; {CONFIG_FILE} says {expected}")


def _storage_format(
    architecture: ModelArchitecture, tensors: dict[str, TensorEntry], stated: WeightFormat | None
) -> WeightFormat:
    """The dtype that most bytes of the text tensors have; a quantised checkpoint must hold what its config states."""
    held: Counter[str] = Counter()
    for name, entry in tensors.items():
        if not any(tower in name for tower in _TOWERS):
            held[entry.dtype] += entry.end - entry.start
    if stated is not None:
        packed = _QUANTISED_DTYPES[stated.stored]
        if not any(held[dtype] for dtype in packed):
            raise InvalidInput(
                f"{CONFIG_FILE} states {stated} weights, but the files hold no {' or '.join(packed)} tensor"
            )
        return as_files_hold(stated, architecture, tensors.values())
    dtype = held.most_common(1)[0][0]
    if dtype not in _FORMATS:
        raise UnsupportedModel(f"the weights are stored as {dtype}; this release serves {', '.join(_FORMATS)}")
    return _FORMATS[dtype]
