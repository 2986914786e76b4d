"""Bytes of INT4 and FP8 matrices in the order in which kernels read them, and what their products hold beside them."""

from __future__ import annotations

INT4_TILE_INPUTS = 256  # inputs of one tile; the last tile of a row is filled up with zeros
FP8_PAIR_INPUTS = 64  # inputs of the two planes that FP8 elements are paired from; filled up likewise
SPLIT_SUM_BYTES = 16 << 20  # parts of sums over split inputs, and counters, once per GPU
DEQUANTISED_BLOCK_BYTES = 64 << 20  # bfloat16 rows of a matrix that a product of many rows has beside it at a time


def int4_tiles(inputs: int) -> int:
    """Tiles of a row of `inputs` elements."""
    return -(-inputs // INT4_TILE_INPUTS)


def int4_matrix_bytes(*, rows: int, inputs: int, group: int, zero_points: bool) -> int:
    """Words, scales (bfloat16) and zero points (two in a byte) of one matrix."""
    tiles, groups = int4_tiles(inputs), INT4_TILE_INPUTS // group
    return rows * tiles * (INT4_TILE_INPUTS // 2 + 2 * groups + (-(-groups // 2) if zero_points else 0))


def fp8_inputs(inputs: int) -> int:
    """Stored elements of a row of `inputs` elements, which is its bytes."""
    return -(-inputs // FP8_PAIR_INPUTS) * FP8_PAIR_INPUTS


def dequantised_rows(*, rows: int, inputs: int) -> int:
    """Rows that are dequantised at a time for a product of many rows: whole multiples of 128, or all."""
    most = max(1, DEQUANTISED_BLOCK_BYTES // (2 * inputs * 128)) * 128
    return min(rows, most)
