"""Quantised matrices on a GPU with kernels: the bytes of the order that those read, and what products hold beside it.

A CPU keeps matrices as published and multiplies in plain PyTorch (`sizing.dequantisation`).
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, NVFP4_GROUP, MatrixFormat, StoredType, WeightFormat
from modelserve.sizing.weights.text import WeightTensor, weight_tensors

INT4_TILE_INPUTS = 256  # inputs of one tile; the last tile of a row is filled up with zeros
INT4_GROUPS = (32, 64, 128, 256)  # inputs of a scale that the kernels take
INT4_SCALE_BYTES = 2  # of a scale that they take: bfloat16 or float16
INT4_FUSED_ROWS = 128  # rows of inputs up to which every GPU unpacks INT4 inside of a product
NVFP4_TILE_INPUTS = 256  # of NVFP4, likewise
INT8_TILE_INPUTS = 128  # of INT8, likewise
INT8_GROUPS = (16, 32, 64, 128)  # inputs of a scale that its kernels take, beside one scale of a row
FP8_PAIR_INPUTS = 64  # inputs of the two planes that FP8 elements are paired from; filled up likewise
SPLIT_SUM_BYTES = 17 << 20  # parts of sums over split inputs, and counters, once per GPU
DEQUANTISED_BLOCK_BYTES = 128 << 20  # bfloat16 rows of a matrix that a product of many rows has beside it at a time


def takes_format(stored: MatrixFormat) -> bool:
    """Whether kernels multiply by a quantised matrix of this format, which they hold in an order of their own; else it
    is dequantised for each product."""
    if stored.stored is StoredType.INT4:
        return stored.group_size in INT4_GROUPS and stored.scale_type.bytes == INT4_SCALE_BYTES
    if stored.stored is StoredType.INT8:
        return stored.group_size is None or stored.group_size in INT8_GROUPS
    return stored.stored in (StoredType.FP8, StoredType.NVFP4)


def int4_tiles(inputs: int) -> int:
    """Tiles of a row of `inputs` elements."""
    return -(-inputs // INT4_TILE_INPUTS)


def int4_matrix_bytes(*, rows: int, inputs: int, group: int, zero_points: bool) -> int:
    """Words, scales and zero points (two in a byte) of one matrix."""
    tiles, groups = int4_tiles(inputs), INT4_TILE_INPUTS // group
    return rows * tiles * (INT4_TILE_INPUTS // 2 + INT4_SCALE_BYTES * groups + (-(-groups // 2) if zero_points else 0))


def int8_inputs(inputs: int) -> int:
    """Stored elements of a row of `inputs` elements, which is its bytes."""
    return -(-inputs // INT8_TILE_INPUTS) * INT8_TILE_INPUTS


def int8_matrix_bytes(*, rows: int, inputs: int, scale_bytes: int) -> int:
    """Elements of one matrix, and `scale_bytes` of scales for each row."""
    return rows * (int8_inputs(inputs) + scale_bytes)


def nvfp4_tiles(inputs: int) -> int:
    """Tiles of a row of `inputs` elements."""
    return -(-inputs // NVFP4_TILE_INPUTS)


def nvfp4_matrix_bytes(*, rows: int, inputs: int) -> int:
    """Words, scales of a byte, and a float32 scale per row of one matrix."""
    return rows * (nvfp4_tiles(inputs) * (NVFP4_TILE_INPUTS // 2 + NVFP4_TILE_INPUTS // NVFP4_GROUP) + 4)


def fp8_inputs(inputs: int) -> int:
    """Stored elements of a row of `inputs` elements, which is its bytes."""
    return -(-inputs // FP8_PAIR_INPUTS) * FP8_PAIR_INPUTS


def fp8_scale_rows(parts: tuple[int, ...]) -> int:
    """Rows that one scale of a blockwise matrix spans: 128, or less where a stacked one begins between blocks."""
    return gcd(FP8_BLOCK, *parts[:-1])


def dequantised_rows(*, rows: int, inputs: int, block_bytes: int = DEQUANTISED_BLOCK_BYTES) -> int:
    """Rows that are dequantised at a time for a product of many rows: whole multiples of 128, or all."""
    most = max(1, block_bytes // (2 * inputs * 128)) * 128
    return min(rows, most)


@lru_cache(maxsize=256)
def tile_padding_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None
) -> int:
    """Bytes by which one rank's matrices are larger than published ones where kernels multiply by them
    (`takes_format`); 0 for most shapes."""
    if weight_format is None:
        return 0
    quantised = [
        tensor
        for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
        if takes_format(weight_format.matrix(tensor.linear))
    ]
    published = (sum(tensor.allocations(weight_format, dense_element=0)) for tensor in quantised)
    held = (_held_bytes(tensor, weight_format.matrix(tensor.linear)) for tensor in quantised)
    return sum(held) - sum(published)


def _held_bytes(tensor: WeightTensor, stored: MatrixFormat) -> int:
    """Of a quantised matrix in the kernels' order."""
    rows, inputs = tensor.rows, tensor.columns
    if stored.stored is StoredType.INT4:
        assert stored.group_size is not None
        order = inputs * 4 if stored.activation_order else 0
        return order + tensor.count * int4_matrix_bytes(
            rows=rows,
            inputs=inputs,
            group=stored.group_size,
            zero_points=not stored.symmetric,
        )
    if stored.stored is StoredType.NVFP4:
        return tensor.count * nvfp4_matrix_bytes(rows=rows, inputs=inputs)
    if stored.stored is StoredType.INT8:
        groups = inputs // stored.group_size if stored.group_size else None
        scale_bytes = 4 if groups is None else groups * stored.scale_type.bytes
        return tensor.count * int8_matrix_bytes(rows=rows, inputs=inputs, scale_bytes=scale_bytes)
    scales = rows
    if stored.scales == "block":
        scales = -(-rows // fp8_scale_rows(tensor.parts)) * -(-inputs // FP8_BLOCK)
    return tensor.count * (rows * fp8_inputs(inputs) + 4 * scales)
