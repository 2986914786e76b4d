"""Products of one or two rows with INT4, NVFP4 or INT8 matrices on Hopper: the launch of `integer_rows_sm90.cu`.

Elements of x are rounded to within 2^-15 of the largest of their 32, for INT8 of their 128, which is far below what
bfloat16 left of them. One that is infinite, or no number, makes NaN of all outputs: of its 32 the unit is NaN. Other
kernels give what float does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.products import INTEGER_ROWS, integer_bytes
from modelserve.sizing.weights.quantised_tiles import INT4_TILE_INPUTS, INT8_TILE_INPUTS
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer
from modelserve_worker.kernels.products.hopper import linear_rows_sm90
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import SHARED_BYTES, readable
from modelserve_worker.kernels.products.hopper.matrix_maps import (
    eight_bit_map,
    scale_map,
    scale_stage_bytes,
    tiled_maps,
    zero_maps,
)
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.linear_tiles import empty_product
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles

_BARRIER_BYTES = 2 * 8


@dataclass(frozen=True, slots=True)
class IntegerKernel:
    """One compilation: `tile` rows of the matrix times up to `rows` rows of x.

    `blocks` of 256 inputs, of INT8 128, with `scales` each, in a stage, one for each group of warps. `tiles`: of so
    many inputs that x has, or one of `parts` of it that are multiplied apart, in whole stages. `half_scales`: of INT4
    and INT8, they are float16. `zeros`: INT4's groups have zero points.
    """

    tile: int
    blocks: int
    rows: int
    scales: int
    tiles: int
    gated: bool
    parts: int = 1
    nvfp4: bool = False
    int8: bool = False
    half_scales: bool = False
    zeros: bool = False

    @property
    def consumers(self) -> int:
        """Threads that multiply: a warp for 32 rows of the matrix in each group."""
        return self.blocks * self.tile

    @property
    def stage_bytes(self) -> int:
        """Words and scales."""
        scales = scale_stage_bytes(self.blocks * self.tile // 2, self.scales, nvfp4=self.nvfp4, zeros=self.zeros)
        return -(-(self.consumers * 128 + scales) // 1024) * 1024

    @property
    def kept_bytes(self) -> int:
        """Of x as integers, with a unit for 32 of them, and of sums that meet."""
        inputs = self.tiles * (INT8_TILE_INPUTS if self.int8 else INT4_TILE_INPUTS)
        return integer_bytes(self.rows, inputs) + (self.blocks - 1) * self.tile * 16

    @property
    def stages(self) -> int:
        return (SHARED_BYTES - self.kept_bytes) // (self.stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + _BARRIER_BYTES) + self.kept_bytes

    @property
    def source(self) -> CudaSource:
        defines = {
            "OUTPUTS": self.tile, "GROUPS": self.blocks, "ROWS": self.rows, "SCALES": self.scales, "TILES": self.tiles,
            "GATED": int(self.gated), "SPLIT": int(self.parts > 1), "STAGES": self.stages,
            **({"NVFP4": 1} if self.nvfp4 else {}), **({"INT8": 1} if self.int8 else {}),
            **({"HALF_SCALES": 1} if self.half_scales else {}), **({"ZEROS": 1} if self.zeros else {}),
        }  # fmt: skip
        stated = tuple(f"{name}={value}" for name, value in defines.items())
        return CudaSource("integer_rows_sm90.cu", "integer_rows", "sm_90a", stated, self.shared_bytes)


def kernel_for(
    rows: int, matrix: Int4Tiles | Nvfp4Tiles | Int8Pairs, *, gated: bool = False, split: bool = False
) -> IntegerKernel:
    """With the division of the kernel of few rows. `rows`: at most as many as the table of kernels says."""
    nvfp4, int8 = isinstance(matrix, Nvfp4Tiles), isinstance(matrix, Int8Pairs)
    if isinstance(matrix, Int8Pairs):
        scales = INT8_TILE_INPUTS // matrix.group if matrix.group else 0
        blocks = matrix.elements.shape[1] // INT8_TILE_INPUTS
    else:
        scales, blocks = matrix.scales.shape[1], len(matrix.words)
    division = linear_rows_sm90.kernel_for(
        rows, matrix.rows, int4_scales=scales, fp8=int8, gated=gated, split=split, nvfp4=nvfp4
    )
    tiles = -(-blocks // (division.blocks * division.parts)) * division.blocks
    bucket = next(most for most in INTEGER_ROWS if rows <= most)
    zeros = isinstance(matrix, Int4Tiles) and matrix.zero_points is not None
    return IntegerKernel(
        division.tile, division.blocks, bucket, scales, tiles, gated, division.parts, nvfp4, int8,
        half_scales=matrix.scales.dtype is torch.float16, zeros=zeros,
    )  # fmt: skip


def integer_rows(x: Tensor, matrix: Int4Tiles | Nvfp4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix [N, K] -> [T, N]; `gated` and `split` as of `dense_rows`. Where it
    has zero points, N is a multiple of 16."""
    kernel = kernel_for(x.shape[0], matrix, gated=gated, split=split)
    words, scales = tiled_maps(matrix, kernel.tile // 2, kernel.blocks)
    row_scales = matrix.row_scales if isinstance(matrix, Nvfp4Tiles) else None
    return _product(
        x, kernel, words, scales, matrix.rows, row_scales, zero_maps(matrix, kernel.tile // 2, kernel.blocks)
    )


def int8_integer_rows(x: Tensor, matrix: Int8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
    """The same with an INT8 matrix: a scale for each row, or for groups of 32, 64 or 128 in two bytes; then of whole
    blocks of 128 inputs and eights of outputs."""
    kernel = kernel_for(x.shape[0], matrix, gated=gated, split=split)
    elements = eight_bit_map(matrix.elements, kernel.tile // 2, kernel.blocks)
    if not kernel.scales:
        return _product(x, kernel, elements, elements, matrix.rows, matrix.scales)
    scales = scale_map(matrix.scales, matrix.rows, kernel.scales, kernel.tile // 2, kernel.blocks)
    return _product(x, kernel, elements, scales, matrix.rows)


def _product(
    x: Tensor,
    kernel: IntegerKernel,
    words: Any,
    scales: Any,
    matrix_rows: int,
    row_scales: Tensor | None = None,
    zeros: tuple[Any, ...] = (),
) -> Tensor:
    x, gated, parts = readable(x), kernel.gated, kernel.parts
    rows, inputs = x.shape
    outputs, second = (matrix_rows // 2, matrix_rows // 2) if gated else (matrix_rows, kernel.tile // 2)
    output, tiles = empty_product(x, outputs, parts), -(-matrix_rows // kernel.tile)
    numbers = (rows, inputs, x.stride(0), outputs, second, tiles, parts, kernel.tiles // kernel.blocks)
    launch(
        kernel.source, grid=(tiles * parts, 1), threads=kernel.consumers + 32,
        arguments=(
            (words, None), (scales, None), pointer(x), pointer(output),
            *((number, ctypes.c_int) for number in numbers), *(() if row_scales is None else (pointer(row_scales),)),
            *((each, None) for each in zeros),
        ), resident=1,
    )  # fmt: skip
    return output
