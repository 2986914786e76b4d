"""What is said where a quantisation is not read: what was found, and what to use in its place."""

from __future__ import annotations

from modelserve.errors import UnsupportedModel

REMEDY = (
    "a bfloat16 checkpoint, or one in INT4 (compressed-tensors, GPTQ, AWQ or AutoRound), INT8, FP8 or NVFP4 "
    "(compressed-tensors or ModelOpt) with bfloat16 embeddings, head and router"
)
SHOWN = 64  # characters of a value that are repeated


def unknown(found: str, instead: str = REMEDY) -> UnsupportedModel:
    """The error for `found`, which is not served; `instead` is what to use."""
    return UnsupportedModel(f"quantization_config: {found} is not served; use {instead}", field="quantization_config")


def shown(value: object) -> str:
    return str(value)[:SHOWN]
