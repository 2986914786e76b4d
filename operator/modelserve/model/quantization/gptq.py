"""GPTQ, as GPTQModel and AutoGPTQ write it, with `dynamic` rules for single modules.

All linear layers within decoder layers may be quantised; the files say which are (`files.as_files_hold`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.model.quantization.linears import FormatOf, checked
from modelserve.model.quantization.patterns import HEAD, expression, spelled
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import Layout, MatrixFormat, ScaleType, StoredType

INSTEAD = "a GPTQ checkpoint of 4 bits with groups, or of 8 bits, symmetric, or one in compressed-tensors"
_LAYOUTS = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
WHOLE = -1  # a `group_size` that stands for all inputs


def format_of_modules(stated: Mapping[str, Any]) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for other bits, orders or packings."""
    named = stated.get("checkpoint_format") or stated.get("format") or "gptq"
    layout = _LAYOUTS.get(str(named))
    if layout is None or stated.get("pack_dtype", "int32") != "int32":
        raise unknown(f"checkpoint_format {shown(named)} of quant_method gptq", INSTEAD)
    rules = _rules(stated.get("dynamic"))

    def format_of(name: str) -> MatrixFormat | None:
        if not name.startswith("layers."):
            return packed_format(stated, layout) if name == HEAD and stated.get(HEAD) is True else None
        if name.endswith(".router.proj"):
            return None
        for pattern, override in rules:
            if any(pattern.match(each) for each in spelled(name)):
                return None if override is None else packed_format({**stated, **override}, layout)
        return packed_format(stated, layout)

    return format_of


def packed_format(stated: Mapping[str, Any], layout: Layout) -> MatrixFormat:
    """Of `bits`, `group_size`, `sym` and `desc_act`, as GPTQ and AutoRound pack them."""
    bits, size = stated.get("bits"), stated.get("group_size", 128)
    symmetric, ordered = stated.get("sym", True) is True, stated.get("desc_act") is True
    text = f"{shown(bits)} bits, group_size {shown(size)}, {'symmetric' if symmetric else 'asymmetric'}"
    text += f"{', desc_act' if ordered else ''} in {layout} packing"
    fields: dict[str, Any] = {"layout": layout, "scale_type": ScaleType.FLOAT16}
    if bits == 4 and size != WHOLE:
        return checked(
            {**fields, "stored": StoredType.INT4, "scales": "group", "group_size": size, "symmetric": symmetric,
             "activation_order": ordered}, text,
        )  # fmt: skip
    if bits == 8 and symmetric and not ordered and layout is not Layout.AWQ:
        if size == WHOLE:
            return checked({"layout": layout, "stored": StoredType.INT8, "scales": "channel"}, text)
        return checked({**fields, "stored": StoredType.INT8, "scales": "group", "group_size": size}, text)
    raise unknown(text, INSTEAD)


def _rules(dynamic: object) -> list[tuple[Any, Mapping[str, Any] | None]]:
    """Patterns of modules and what is other of them, None where they are left ("-:"), in their order."""
    if dynamic is None:
        return []
    if not isinstance(dynamic, Mapping):
        raise unknown(f"dynamic {shown(dynamic)}", INSTEAD)
    rules: list[tuple[Any, Mapping[str, Any] | None]] = []
    for text, override in dynamic.items():
        left = str(text).startswith("-:")
        if not left and not isinstance(override, Mapping):
            raise unknown(f"dynamic {shown(text)}: {shown(override)}", INSTEAD)
        rules.append((expression(str(text).removeprefix("-:").removeprefix("+:")), None if left else override))
    return rules
