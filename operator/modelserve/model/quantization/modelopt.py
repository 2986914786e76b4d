"""NVIDIA ModelOpt: one `quant_algo` for all modules but those of `exclude_modules`, or one for each of
`quantized_layers` (MIXED_PRECISION). config.json has it flat, with `ignore`; hf_quant_config.json under `quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.model.quantization.linears import FormatOf, checked
from modelserve.model.quantization.patterns import listed, spelled, wildcards
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import NVFP4_GROUP, Layout, MatrixFormat, StoredType

METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
_FP4 = {"stored": StoredType.NVFP4, "scales": "group", "layout": Layout.MODELOPT}
_FP8 = {"stored": StoredType.FP8, "fp8_activations": True}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "NVFP4": _FP4,
    "W4A16_NVFP4": _FP4,
    "FP8": {**_FP8, "scales": "tensor"},
    "FP8_PER_CHANNEL_PER_TOKEN": {**_FP8, "scales": "channel"},
}
INSTEAD = "a checkpoint whose quant_algo is NVFP4, FP8 or MIXED_PRECISION of these, or one in compressed-tensors"


def details(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of the quantisation, flat or under `quantization`."""
    inner = stated.get("quantization")
    return {**stated, **inner} if isinstance(inner, Mapping) else stated


def format_of_modules(stated: Mapping[str, Any]) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for an algorithm that is not read."""
    said = details(stated)
    left = wildcards([*listed(said.get("exclude_modules")), *listed(said.get("ignore"))])
    if said.get("quant_algo") != MIXED:
        stored = _format(said)
        return lambda name: None if left(name) else stored
    layers = said.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise unknown(f"quant_algo {MIXED} without quantized_layers", INSTEAD)
    of_layers = {str(name): _format(layer) for name, layer in layers.items()}

    def format_of(name: str) -> MatrixFormat | None:
        if left(name):
            return None
        return next((found for each in spelled(name) if (found := _above(each, of_layers)) is not None), None)

    return format_of


def _above(name: str, layers: Mapping[str, MatrixFormat]) -> MatrixFormat | None:
    """Of the module, or of the nearest one that it is part of."""
    while name:
        if name in layers:
            return layers[name]
        name = name.rpartition(".")[0]
    return None


def _format(said: object) -> MatrixFormat:
    algorithm = said.get("quant_algo") if isinstance(said, Mapping) else said
    fields = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if fields is None or not isinstance(said, Mapping):
        raise unknown(f"quant_algo {shown(algorithm)} of quant_method {METHOD}", INSTEAD)
    size = said.get("group_size") or NVFP4_GROUP
    text = f"quant_algo {algorithm} with group_size {shown(size)}"
    return checked({**fields, "group_size": size} if fields is _FP4 else fields, text)
