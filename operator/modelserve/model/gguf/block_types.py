"""Types of a GGUF file's tensors: how many elements a block has, and how many bytes it takes.

Numbers and sizes are those of ggml (`GGML_QUANT_SIZES` of the `gguf` package 0.19, which tests compare them with). All
are known, so that what is refused is refused by name; `modelserve.model.gguf.weight_format` says which are served.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """A row is blocks of `elements` elements, each `bytes` long; plain types have blocks of one element."""

    name: str
    elements: int
    bytes: int


F32, F16, BF16 = BlockType("F32", 1, 4), BlockType("F16", 1, 2), BlockType("BF16", 1, 2)
Q4_0, Q5_0, Q8_0 = BlockType("Q4_0", 32, 18), BlockType("Q5_0", 32, 22), BlockType("Q8_0", 32, 34)
Q4_1, Q5_1 = BlockType("Q4_1", 32, 20), BlockType("Q5_1", 32, 24)
Q4_K, Q5_K, Q6_K = BlockType("Q4_K", 256, 144), BlockType("Q5_K", 256, 176), BlockType("Q6_K", 256, 210)

BLOCK_TYPES = {
    0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 6: Q5_0, 7: Q5_1, 8: Q8_0,
    9: BlockType("Q8_1", 32, 40), 10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: Q4_K, 13: Q5_K, 14: Q6_K, 15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74), 18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18), 21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136), 24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2), 26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8), 28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56), 30: BF16, 34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17), 40: BlockType("NVFP4", 64, 36), 41: BlockType("Q1_0", 128, 18),
}  # fmt: skip
