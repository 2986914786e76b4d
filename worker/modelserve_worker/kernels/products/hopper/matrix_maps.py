"""What the copy engine is told of matrices: boxes of some rows of `blocks` blocks of inputs, 128 bytes of each row."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from modelserve_worker.kernels.compiling.cuda_kernel import tensor_map
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.nvfp4_linear import GROUPS, Nvfp4Tiles

INPUTS = 64  # of a block of bfloat16, and of a box of x: 128 bytes, as which other elements are copied, too


def blocks_of(matrix: Tensor, rows: int, blocks: int) -> Any:
    """A matrix [R, K] as blocks of 64 inputs, of which a box has `blocks`, of `rows` rows."""
    stride = matrix.stride(0) * matrix.element_size()
    sizes = (INPUTS, matrix.shape[0], matrix.shape[1] // INPUTS)
    return tensor_map(matrix.data_ptr(), sizes, (stride, 2 * INPUTS), (INPUTS, rows, blocks), promoted=False)


def eight_bit_map(elements: Tensor, rows: int, blocks: int) -> Any:
    """Of elements of a byte [R, K]: blocks of 128 inputs."""
    outputs, stored = elements.shape
    sizes, box = (INPUTS, outputs, stored // 128), (INPUTS, rows, blocks)
    return tensor_map(elements.data_ptr(), sizes, (stored, 128), box, promoted=False)


def tiled_maps(matrix: Int4Tiles | Nvfp4Tiles, rows: int, blocks: int) -> tuple[Any, Any]:
    """Of words and scales, blocks being tiles; those of an expert behind those of the one before."""
    *experts, tiles, outputs, _ = matrix.words.shape
    sizes = INPUTS, outputs, tiles * math.prod(experts)
    box = INPUTS, rows, blocks
    words = tensor_map(matrix.words.data_ptr(), sizes, (128, 128 * outputs), box, promoted=False)
    if isinstance(matrix, Nvfp4Tiles):  # two scales of a byte are copied as one of two
        return words, scale_map(matrix.scales, outputs // 2, GROUPS, rows // 2, blocks)
    return words, scale_map(matrix.scales, outputs, matrix.scales.shape[1], rows, blocks)


def zero_maps(matrix: Int4Tiles | Nvfp4Tiles, rows: int, blocks: int) -> tuple[Any, ...]:
    """Of zero points, those of two groups in a byte, and two bytes copied as one scale; none where there are none."""
    zeros = matrix.zero_points if isinstance(matrix, Int4Tiles) else None
    if zeros is None:
        return ()
    return (scale_map(zeros, matrix.rows // 2, zeros.shape[-2], rows // 2, blocks),)


def scale_stage_bytes(rows: int, scales: int, *, nvfp4: bool, zeros: bool) -> int:
    """Of both halves of a stage: scales of so many rows, and of INT4 zero points, two in a byte, in whole 128 bytes."""
    of_half = -(-rows * scales * (1 if nvfp4 else 2) // 128) * 128
    if zeros:
        of_half += -(-rows * ((scales + 1) // 2) // 128) * 128
    return 2 * of_half


def scale_map(scales: Tensor, outputs: int, of_block: int, rows: int, blocks: int) -> Any:
    """Of two bytes, [groups of inputs, outputs], of which a block has `of_block`; as they lie, not swizzled."""
    of_row = 2 * outputs
    sizes = outputs, of_block, scales.nbytes // (of_row * of_block)
    box = rows, of_block, blocks
    return tensor_map(scales.data_ptr(), sizes, (of_row, of_block * of_row), box, swizzled=False, promoted=False)
