"""transformers' FP8: e4m3 with scales of blocks of 128 x 128 (`weight_scale_inv`), or one of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.model.quantization.linears import FormatOf, checked
from modelserve.model.quantization.patterns import listed, parts
from modelserve.model.quantization.refusal import shown, unknown
from modelserve.model.weight_format import FP8_BLOCK, Layout, StoredType

INSTEAD = "an FP8 checkpoint with weight_block_size [128, 128], or one in compressed-tensors (FP8-dynamic)"


def format_of_modules(stated: Mapping[str, Any]) -> FormatOf:
    """What the config says of each module. Raises UnsupportedModel for blocks of another size."""
    block, inputs = stated.get("weight_block_size"), stated.get("activation_scheme", "dynamic")
    if block not in (None, [FP8_BLOCK, FP8_BLOCK]) or inputs not in ("dynamic", "static"):
        raise unknown(
            f"weight_block_size {shown(block)}, activation_scheme {shown(inputs)} of quant_method fp8", INSTEAD
        )
    scales = {"scales": "block", "layout": Layout.BLOCK_FP8} if block else {"scales": "tensor"}
    stored = checked({"stored": StoredType.FP8, "fp8_activations": True, **scales}, "quant_method fp8")
    left = parts([*listed(stated.get("modules_to_not_convert")), *listed(stated.get("ignored_layers"))])
    unread = parts(("lm_head", "router"))  # which the tool leaves in any case
    return lambda name: None if left(name) or unread(name) else stored
