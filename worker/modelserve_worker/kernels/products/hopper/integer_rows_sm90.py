"""Products of one or two rows with symmetric INT4 or NVFP4 matrices on Hopper: the launch of `integer_rows_sm90.cu`.

Elements of x are rounded to within 2^-15 of the largest of their 32, which is far below what bfloat16 left of them. One
that is infinite, or no number, makes NaN of all outputs: of its 32 the unit is NaN. Other kernels give what float does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelserve.sizing.backends.products import INTEGER_ROWS, integer_bytes
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.products.hopper import linear_rows_sm90
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import SHARED_BYTES, nvfp4_maps, readable
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.linear_tiles import empty_product
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles

_WORDS = 64  # of a box of words: 128 bytes, which look like 64 elements of bfloat16
_BARRIER_BYTES = 2 * 8


@dataclass(frozen=True, slots=True)
class IntegerKernel:
    """One compilation: `tile` rows of the matrix, with `scales` in 256 inputs, times up to `rows` rows of x.

    `blocks` of 256 inputs in a stage, one for each group of warps. `tiles`: of 256 inputs that x has, or one of `parts`
    of it that are multiplied apart, in whole stages.
    """

    tile: int
    blocks: int
    rows: int
    scales: int
    tiles: int
    gated: bool
    parts: int = 1
    nvfp4: bool = False

    @property
    def consumers(self) -> int:
        """Threads that multiply: a warp for 32 rows of the matrix in each group."""
        return self.blocks * self.tile

    @property
    def stage_bytes(self) -> int:
        """Words and scales."""
        of_half = self.blocks * self.tile // 2 * self.scales * (1 if self.nvfp4 else 2)
        scales = 2 * -(-of_half // 128) * 128
        return -(-(self.consumers * 128 + scales) // 1024) * 1024

    @property
    def kept_bytes(self) -> int:
        """Of x as integers, with a unit for 32 of them, and of sums that meet."""
        return integer_bytes(self.rows, self.tiles) + (self.blocks - 1) * self.tile * 16

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
            **({"NVFP4": 1} if self.nvfp4 else {}),
        }  # fmt: skip
        stated = tuple(f"{name}={value}" for name, value in defines.items())
        return CudaSource("integer_rows_sm90.cu", "integer_rows", "sm_90a", stated, self.shared_bytes)


def kernel_for(rows: int, matrix: Int4Tiles | Nvfp4Tiles, *, gated: bool = False, split: bool = False) -> IntegerKernel:
    """With the division of the kernel of few rows. `rows`: at most as many as the table of kernels says."""
    blocks, matrix_rows, _ = matrix.words.shape
    scales, nvfp4 = matrix.scales.shape[1], isinstance(matrix, Nvfp4Tiles)
    division = linear_rows_sm90.kernel_for(rows, matrix_rows, int4_scales=scales, gated=gated, split=split, nvfp4=nvfp4)
    tiles = -(-blocks // (division.blocks * division.parts)) * division.blocks
    bucket = next(most for most in INTEGER_ROWS if rows <= most)
    return IntegerKernel(division.tile, division.blocks, bucket, scales, tiles, gated, division.parts, nvfp4)


def integer_rows(x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix [N, K] -> [T, N]; `gated` and `split` as of `dense_rows`."""
    kernel = kernel_for(x.shape[0], matrix, gated=gated, split=split)
    blocks, matrix_rows, _ = matrix.words.shape
    half, of_row = kernel.tile // 2, 2 * matrix_rows
    words = tensor_map(
        matrix.words.data_ptr(), (_WORDS, matrix_rows, blocks), (128, 128 * matrix_rows), (_WORDS, half, kernel.blocks),
        promoted=False,
    )  # fmt: skip
    scales = tensor_map(
        matrix.scales.data_ptr(), (matrix_rows, kernel.scales, blocks), (of_row, kernel.scales * of_row),
        (half, kernel.scales, kernel.blocks), swizzled=False, promoted=False,
    )  # fmt: skip
    return _product(x, kernel, words, scales, matrix_rows)


def nvfp4_integer_rows(x: Tensor, matrix: Nvfp4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
    """The same with an NVFP4 matrix."""
    kernel = kernel_for(x.shape[0], matrix, gated=gated, split=split)
    words, scales = nvfp4_maps(matrix, kernel.tile // 2, kernel.blocks)
    return _product(x, kernel, words, scales, matrix.rows, matrix.row_scales)


def _product(
    x: Tensor, kernel: IntegerKernel, words: Any, scales: Any, matrix_rows: int, row_scales: Tensor | None = None
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
        ), resident=1,
    )  # fmt: skip
    return output
