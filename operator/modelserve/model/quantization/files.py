"""What the files of a quantised checkpoint hold, where its config does not tell: which linear layers are quantised, and
in which type the scales of groups are.

Tools that quantise modules of class Linear leave fused experts as they are; GPTQ, AWQ and AutoRound name what they
leave in part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import TensorEntry
from modelserve.model.quantization.linears import modules, of_linears
from modelserve.model.quantization.patterns import PREFIXES
from modelserve.model.quantization.refusal import unknown
from modelserve.model.weight_format import MatrixFormat, ScaleType, StoredType, TextLinear, WeightFormat

_FUSED = {TextLinear.EXPERT_GATE_UP: "gate_up_proj", TextLinear.EXPERT_DOWN: "down_proj"}
_DENSE = ("BF16", "F16", "F32")
_SCALE_TYPES = {"BF16": ScaleType.BFLOAT16, "F16": ScaleType.FLOAT16, "F32": ScaleType.FLOAT32}
_SCALES = ("weight_scale", "scales")


def as_files_hold(
    stated: WeightFormat, architecture: ModelArchitecture, tensors: Iterable[TensorEntry]
) -> WeightFormat:
    """The stated format, without linear layers that are not quantised, with the scales that there are.

    Raises UnsupportedModel for linear layers of one kind of which only some are quantised.
    """
    dtypes = {_bare(entry.name): entry.dtype for entry in tensors}
    found: dict[TextLinear, MatrixFormat | None] = {}
    for linear, names in modules(architecture).items():
        stored = stated.matrix(linear) if stated.matrix(linear).quantised else None
        found[linear] = None if stored is None else _held(stored, linear, names, dtypes)
    return of_linears(found)


def _held(stored: MatrixFormat, linear: TextLinear, names: list[str], dtypes: Mapping[str, str]) -> MatrixFormat | None:
    """Of one kind of linear layers: its format, None where its modules are not quantised."""
    fused = _FUSED.get(linear)
    if fused is not None:
        layers = {name.partition("experts.")[0] for name in names}
        if any(dtypes.get(f"{layer}experts.{fused}") in _DENSE for layer in layers):
            return None
        scales = [f"{layer}experts.{fused}_scale" for layer in layers]
    else:
        scales = []
    dense = [name for name in names if dtypes.get(f"{name}.weight") in _DENSE and not _scaled(name, dtypes)]
    if len(dense) == len(names):
        return None
    if dense:
        there = next(name for name in names if name not in dense)
        raise unknown(f"{there} quantised and {dense[0]} not (one format must hold for {linear} of all layers)")
    if stored.group_size is None or stored.stored is StoredType.NVFP4:
        return stored
    scales += [f"{names[0]}.{scale}" for scale in _SCALES]
    held = next((dtypes[scale] for scale in scales if scale in dtypes), None)
    return stored.model_copy(update={"scale_type": _SCALE_TYPES[held]}) if held in _SCALE_TYPES else stored


def _scaled(name: str, dtypes: Mapping[str, str]) -> bool:
    """Whether a module has scales of weights, so that it must be quantised."""
    return f"{name}.weight_scale" in dtypes or f"{name}.weight_scale_inv" in dtypes


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
