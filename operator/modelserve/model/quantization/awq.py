"""AutoAWQ: 4 bits with a zero point per group, packed along the outputs in an order of its own ("gemm").

All linear layers within decoder layers may be quantised; the files say which are (`files.as_files_hold`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.model.quantization.gptq import packed_format
from modelserve.model.quantization.linears import FormatOf
from modelserve.model.quantization.patterns import listed, parts
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import Layout

INSTEAD = "an AWQ checkpoint of version gemm, or one in compressed-tensors"


def format_of_modules(stated: Mapping[str, Any]) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for other bits or packings."""
    version = str(stated.get("version", "gemm")).lower()
    if version != "gemm":
        raise unknown(f"version {shown(version)} of quant_method awq", INSTEAD)
    left = parts(listed(stated.get("modules_to_not_convert")))
    bits = stated.get("bits", stated.get("w_bit"))
    size = stated.get("group_size", stated.get("q_group_size", 128))
    # Zero points are stored in any case, so that they are read in any.
    stored = packed_format({"bits": bits, "group_size": size, "sym": False}, Layout.AWQ)

    def outside(name: str) -> bool:
        return not name.startswith("layers.") or name.endswith(".router.proj")

    return lambda name: None if outside(name) or left(name) else stored
