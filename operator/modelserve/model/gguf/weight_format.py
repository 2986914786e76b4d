"""How a GGUF file stores the text weights: the types of its tensors as a weight format.

A kind of linear layer that is Q4_0 everywhere is symmetric INT4 with a scale per 32 inputs. Every other is INT8 with
such scales: Q8_0, Q5_0 and Q4_0 exactly, types with a minimum and K-quants as llama.cpp would quantise them to Q8_0.
Embeddings and an output head of its own are held unquantised, whatever the file has them in.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.gguf.block_types import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockType,
)
from modelserve.model.gguf.files import GgufCheckpoint
from modelserve.model.gguf.header import GgufTensor
from modelserve.model.gguf.tensor_names import HEAD, LAYER_EMBEDDING, TOKEN_EMBEDDING, gguf_name, text_name
from modelserve.model.quantization.linears import modules, of_linears
from modelserve.model.weight_format import (
    BFLOAT16,
    Layout,
    MatrixFormat,
    ScaleType,
    StoredType,
    TextLinear,
    WeightFormat,
)

FLOATS = (F32, F16, BF16)
INTEGERS = (Q4_0, Q5_0, Q8_0)  # times a scale: exact in INT8
ROUNDED = (Q4_1, Q5_1, Q4_K, Q5_K, Q6_K)  # rounded once more
SERVED = (*FLOATS, *INTEGERS, *ROUNDED)
GROUP = 32
REMEDY = "use a Q4_0 or Q8_0 file of the model"
_EXPERTS = {TextLinear.EXPERT_GATE_UP: "gate_up_proj", TextLinear.EXPERT_DOWN: "down_proj"}


def gguf_weight_format(checkpoint: GgufCheckpoint, architecture: ModelArchitecture) -> WeightFormat:
    """The format of the text weights. Raises UnsupportedModel, naming tensor, type and remedy, for types that are not
    served, and for types of one kind of linear layer that no format here holds together; InvalidInput for a linear
    layer that the file does not have."""
    tensors_of = dict(_tensors_of(architecture))
    held = {linear: _format(checkpoint, linear, names) for linear, names in tensors_of.items()}
    _check_others(checkpoint, architecture, {name for names in tensors_of.values() for name in names})
    return of_linears(held) if any(held.values()) else BFLOAT16


def rounded_once_more(checkpoint: GgufCheckpoint, stored: WeightFormat) -> tuple[str, ...]:
    """What the file has in a type whose elements INT8 does not hold exactly, in a sentence; nothing where all are."""
    tables = (TOKEN_EMBEDDING, LAYER_EMBEDDING, HEAD)
    linears = (tensor for name, (_, tensor) in checkpoint.tensors.items() if name not in tables)
    found = [tensor for tensor in linears if tensor.type in ROUNDED]
    if not found or not stored.quantised:
        return ()
    named = f"{len(found)} tensors, {found[0].name} ({found[0].type.name}) the first,"
    return (f"{named} are held in INT8, rounded once more as llama.cpp rounds to Q8_0",)


def _check_others(checkpoint: GgufCheckpoint, architecture: ModelArchitecture, linears: set[str]) -> None:
    """Raises UnsupportedModel where a tensor beside linear layers has a type that is not served for it."""
    for name, (path, tensor) in checkpoint.tensors.items():
        served = SERVED if name in (TOKEN_EMBEDDING, LAYER_EMBEDDING, HEAD) else FLOATS
        if tensor.type in served or name in linears or text_name(name) == name or _unread(name, architecture):
            continue
        known = ", ".join(each.name for each in served)
        raise UnsupportedModel(f"{path}: tensor {name!r} is {tensor.type.name}; {known} are served there: {REMEDY}")


def _unread(name: str, architecture: ModelArchitecture) -> bool:
    """Whether it is of a layer that reads another's cache, whose own keys and values nothing uses."""
    parts = name.split(".")
    return parts[0] == "blk" and parts[2] in ("attn_k", "attn_v") and not architecture.owns_cache(int(parts[1]))


def _tensors_of(architecture: ModelArchitecture) -> Iterator[tuple[TextLinear, list[str]]]:
    """Names of the tensors that each kind of linear layer is made of."""
    layers = range(architecture.num_hidden_layers)
    for linear, names in modules(architecture).items():
        if linear in _EXPERTS:
            yield linear, [gguf_name(f"layers.{layer}.experts.{_EXPERTS[linear]}") for layer in layers]
        else:
            yield linear, [gguf_name(f"{name}.weight") for name in names]


def _format(checkpoint: GgufCheckpoint, linear: TextLinear, names: list[str]) -> MatrixFormat | None:
    """What one kind of linear layer is held in; None stands for unquantised."""
    first: dict[BlockType, GgufTensor] = {}  # of each type
    for name in names:
        if name not in checkpoint.tensors:
            raise InvalidInput(f"{checkpoint.first} holds no tensor {name!r}: convert or download it again")
        _, tensor = checkpoint.tensors[name]
        first.setdefault(tensor.type, tensor)
    for kind, tensor in first.items():
        if kind not in SERVED:
            known = ", ".join(each.name for each in SERVED)
            raise UnsupportedModel(
                f"{checkpoint.first}: tensor {tensor.name!r} is {kind.name}; {known} are served for linear "
                f"layers: {REMEDY}"
            )
    quantised = [kind for kind in first if kind not in FLOATS]
    if quantised and len(quantised) < len(first):
        one, other = first[quantised[0]], next(tensor for kind, tensor in first.items() if kind in FLOATS)
        raise UnsupportedModel(
            f"{checkpoint.first}: tensor {one.name!r} is {one.type.name} and {other.name!r} {other.type.name}; "
            f"{linear} of all layers must be quantised, or none: {REMEDY}"
        )
    if not quantised:
        return None
    stored = StoredType.INT4 if quantised == [Q4_0] else StoredType.INT8
    return MatrixFormat(
        stored=stored, scales="group", group_size=GROUP, scale_type=ScaleType.FLOAT16, layout=Layout.GGUF
    )
