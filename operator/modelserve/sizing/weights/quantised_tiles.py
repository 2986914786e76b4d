"""Quantised matrices on a GPU with kernels: the bytes of the order that those read, and what products hold beside it.

A CPU keeps matrices as published and multiplies in plain PyTorch (`sizing.dequantisation`).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, StoredType, WeightFormat
from modelserve.sizing.weights.text import WeightTensor, weight_tensors

INT4_TILE_INPUTS = 256  # inputs of one tile; the last tile of a row is filled up with zeros
INT4_GROUPS = (32, 64, 128, 256)  # inputs of a scale that the kernels take
INT4_FUSED_ROWS = 128  # rows of inputs up to which every GPU unpacks INT4 inside of a product
FP8_PAIR_INPUTS = 64  # inputs of the two planes that FP8 elements are paired from; filled up likewise
SPLIT_SUM_BYTES = 17 << 20  # parts of sums over split inputs, and counters, once per GPU
DEQUANTISED_BLOCK_BYTES = 128 << 20  # bfloat16 rows of a matrix that a product of many rows has beside it at a time


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


def fp8_scale_rows(parts: tuple[int, ...]) -> int:
    """Rows that one scale of a blockwise matrix spans: 128, or less where a stacked one begins between blocks."""
    return gcd(FP8_BLOCK, *parts[:-1])


def dequantised_rows(*, rows: int, inputs: int) -> int:
    """Rows that are dequantised at a time for a product of many rows: whole multiples of 128, or all."""
    most = max(1, DEQUANTISED_BLOCK_BYTES // (2 * inputs * 128)) * 128
    return min(rows, most)


@lru_cache(maxsize=256)
def tile_padding_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None
) -> int:
    """Bytes by which one rank's matrices are larger than published ones where kernels multiply by them
    (`multiplied_by_kernels`); 0 for most shapes."""
    if weight_format is None:
        return 0
    quantised = [
        tensor
        for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
        if weight_format.of(tensor.linear) in (StoredType.INT4, StoredType.FP8)
    ]
    published = (sum(tensor.allocations(weight_format, dense_element=0)) for tensor in quantised)
    return sum(_held_bytes(tensor, weight_format) for tensor in quantised) - sum(published)


def _held_bytes(tensor: WeightTensor, weight_format: WeightFormat) -> int:
    """Of a quantised matrix in the kernels' order."""
    stored = weight_format.of(tensor.linear)
    if stored is StoredType.INT4:
        assert weight_format.group_size is not None
        order = tensor.columns * 4 if weight_format.activation_order else 0
        return order + tensor.count * int4_matrix_bytes(
            rows=tensor.rows,
            inputs=tensor.columns,
            group=weight_format.group_size,
            zero_points=not weight_format.symmetric,
        )
    scales = tensor.rows
    if weight_format.scales == "block":
        scales = -(-tensor.rows // fp8_scale_rows(tensor.parts)) * -(-tensor.columns // FP8_BLOCK)
    return tensor.count * (tensor.rows * fp8_inputs(tensor.columns) + 4 * scales)
