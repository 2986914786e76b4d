"""AutoRound's own format: GPTQ's or AWQ's packing by `packing_format`, other bits of single modules in `extra_config`.

Linear layers within `block_name_to_quantize` are quantised, which are those of decoder layers; the files say which are
(`files.as_files_hold`). What AutoRound exports as llm_compressor is compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.model.quantization.gptq import packed_format
from modelserve.model.quantization.linears import FormatOf
from modelserve.model.quantization.patterns import expression, is_expression, spelled
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import Layout, MatrixFormat

INSTEAD = "a checkpoint that AutoRound exported as auto_round, auto_gptq, auto_awq or llm_compressor with 4 or 8 bits"
_LAYOUTS = {  # auto_gptq's zero points are stored less one, those of the others as they are
    "auto_round": Layout.GPTQ_V2,
    "auto_round:gptqmodel": Layout.GPTQ_V2,
    "auto_round:auto_gptq": Layout.GPTQ,
    "auto_round:auto_awq": Layout.AWQ,
}
UNQUANTISED_BITS = 16


def format_of_modules(stated: Mapping[str, Any]) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for other types or packings."""
    packing = stated.get("packing_format", "auto_round")
    layout = _LAYOUTS.get(str(packing))
    if layout is None:
        raise unknown(f"packing_format {shown(packing)} of quant_method auto-round", INSTEAD)
    extra = stated.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(override, Mapping) for override in extra.values()):
        raise unknown(f"extra_config {shown(extra)}", INSTEAD)
    rules = [(expression(str(text)), override) for text, override in extra.items() if is_expression(str(text))]

    def format_of(name: str) -> MatrixFormat | None:
        override = next((extra[each] for each in spelled(name) if each in extra), None)
        if override is None:
            found = (rule for pattern, rule in rules if any(pattern.search(each) for each in spelled(name)))
            override = next(found, None)
        if override is None and (not name.startswith("layers.") or name.endswith(".router.proj")):
            return None
        return _format({**stated, **(override or {})}, layout)

    return format_of


def _format(said: Mapping[str, Any], layout: Layout) -> MatrixFormat | None:
    bits, kind, inputs = said.get("bits"), said.get("data_type", "int"), said.get("act_bits", UNQUANTISED_BITS)
    if isinstance(bits, int) and bits >= UNQUANTISED_BITS:
        return None
    if kind != "int" or (isinstance(inputs, int) and inputs < UNQUANTISED_BITS):
        raise unknown(f"data_type {shown(kind)} with act_bits {shown(inputs)} of quant_method auto-round", INSTEAD)
    return packed_format(said, layout)
