"""compressed-tensors, as llm-compressor writes it: schemes in `config_groups`, each for the modules of its `targets`.

It names modules by exact name, by "re:" and a regular expression that matches from the start, or by the class "Linear",
in `targets` and in `ignore`; of several schemes that target a module the most particular one holds. Modules of image
and audio towers are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelserve.model.quantization.linears import FormatOf, checked
from modelserve.model.quantization.patterns import EVERY_LINEAR, Matches, expressed, listed, named
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import FP8_BLOCK, NVFP4_GROUP, Layout, MatrixFormat, StoredType

PACKED = ("pack-quantized",)
FLOAT = ("float-quantized", "naive-quantized")
PLAIN_INT = ("int-quantized", "naive-quantized")
NVFP4 = ("nvfp4-pack-quantized",)
MIXED = "mixed-precision"  # of the whole config, where each group has a format of its own

_Stated = Mapping[str, Any]


def format_of_modules(stated: _Stated) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for a scheme that is not read."""
    for name in ("sparsity_config", "transform_config"):
        if stated.get(name):
            raise unknown(f"{name} {shown(stated[name])}")
    if stated.get("quantization_status", "compressed") != "compressed":
        raise unknown(f"quantization_status {shown(stated['quantization_status'])}")
    groups = stated.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if not schemes:
        raise unknown("no config_groups")
    ignored = listed(stated.get("ignore"))
    left = _any(named(ignored), expressed(ignored), lambda _: EVERY_LINEAR in ignored)
    layout = None if stated.get("format") == MIXED else stated.get("format")
    found = [(_scheme_format(scheme, layout=layout), listed(scheme.get("targets"))) for scheme in schemes]
    ranks: tuple[Callable[[Sequence[str]], Matches], ...] = (named, expressed, _every)
    ordered = [(matches(targets), stored) for matches in ranks for stored, targets in found]

    def format_of(name: str) -> MatrixFormat | None:
        if left(name):
            return None
        return next((stored for matches, stored in ordered if matches(name)), None)

    return format_of


def _every(texts: Sequence[str]) -> Matches:
    return lambda _: EVERY_LINEAR in texts


def _any(*of: Matches) -> Matches:
    return lambda name: any(matches(name) for matches in of)


def _scheme_format(scheme: object, *, layout: object) -> MatrixFormat:
    """The format that one group states for what it targets; `layout` is the whole config's, if the group has none."""
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(scheme, Mapping) or not isinstance(weights, Mapping):
        raise unknown("a config group without weights")
    if scheme.get("output_activations"):
        raise unknown("output_activations")
    layout, block = scheme.get("format") or layout, weights.get("block_structure")
    kind, bits, span, size = (weights.get(name) for name in ("type", "num_bits", "strategy", "group_size"))
    symmetric = weights.get("symmetric", True) is True
    stated = {"type": kind, "num_bits": bits, "strategy": span, "group_size": size, "block_structure": block}
    text = ", ".join(f"{name} {str(value)[:32]}" for name, value in stated.items() if value is not None)
    text = f"weights of {text}{'' if symmetric else ', asymmetric'}, format {str(layout)[:32]}"
    inputs = _activations(scheme)
    if (kind, bits, span) == ("int", 4, "group") and layout in (None, *PACKED) and inputs is None:
        ordered = weights.get("actorder") in ("group", "dynamic", True)  # others are undone before weights are stored
        return checked(
            {"stored": StoredType.INT4, "scales": span, "group_size": size, "symmetric": symmetric,
             "activation_order": ordered}, text,
        )  # fmt: skip
    plain = weights.get("actorder") not in ("group", "dynamic", True) and inputs in (None, "int")
    if (kind, bits, symmetric) == ("int", 8, True) and plain and layout in (None, *PACKED, *PLAIN_INT):
        packed = {"layout": Layout.PACKED_INT8} if layout in PACKED else {}
        grouped = {"group_size": size} if span == "group" else {}
        return checked({"stored": StoredType.INT8, "scales": span, **grouped, **packed}, text)
    spans = ("channel", "tensor", "block") if block == [FP8_BLOCK, FP8_BLOCK] else ("channel", "tensor")
    if (kind, bits, symmetric) == ("float", 8, True) and layout in (None, *FLOAT) and span in spans:
        return checked({"stored": StoredType.FP8, "scales": span, "fp8_activations": inputs == "float"}, text)
    grouped_fp4 = ("float", 4, True, NVFP4_GROUP)
    if (kind, bits, symmetric, size) == grouped_fp4 and layout in (None, *NVFP4) and span in ("tensor_group", None):
        return checked({"stored": StoredType.NVFP4, "scales": "group", "group_size": size}, text)
    raise unknown(text)


def _activations(scheme: _Stated) -> str | None:
    """What inputs were rounded to: "float" or "int" of eight bits, "fp4", or None; raises UnsupportedModel for others.

    Scales of activations that the checkpoint has are not used: inputs are rounded by scales of their own, or not.
    """
    stated = scheme.get("input_activations")
    if not stated:
        return None
    if isinstance(stated, Mapping):
        for kind, bits, found in (("float", 8, "float"), ("int", 8, "int"), ("float", 4, "fp4")):
            if (stated.get("type"), stated.get("num_bits")) == (kind, bits):
                return found
    raise unknown(f"input_activations {str(stated)[:96]} (known are none, and float of 8 or 4 or int of 8 bits)")
