"""Products of few rows on Hopper: the launch of `linear_rows_sm90.cu`, over bfloat16 or INT4 matrices.

The matrix is read once, near the speed of memory, whatever the number of rows. Which thread sums what depends on the
matrix and the GPU alone, and sums are added in one order: the same rows give the same bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.generations import HOPPER, generation_of
from modelserve.sizing.backends.products import CHOSEN_SLOTS, FEW_ROWS, ROUNDED_AS_READ
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer
from modelserve_worker.kernels.products.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.products.fp8_linear_triton import rounded_precision
from modelserve_worker.kernels.products.hopper.matrix_maps import (
    INPUTS,
    blocks_of,
    eight_bit_map,
    scale_stage_bytes,
    tiled_maps,
    zero_maps,
)
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.linear_tiles import PARTS, busy, empty_product
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles

ROWS = (8, 16, FEW_ROWS)  # rows of x that a compiled kernel takes at most
TILES = (128, 64, 32)  # rows of the matrix
ONE_TURN_TILES = tuple(range(352, 63, -32))  # of which there may be one for each multiprocessor
SHARED_BYTES = generation_of(HOPPER).shared_bytes  # of a thread block, at most
LEAST_BUSY, LEAST_BUSY_SPLIT, LEAST_BUSY_TURN = 0.62, 0.9, 0.95  # share of multiprocessors' turns that have work
MULTIPROCESSORS = 132  # that tiles are chosen for: an H100's and an H200's
BESIDE_BYTES = 36 << 10  # of shared memory, that a kernel beside may take
LEAST_STAGES = 3  # that keep memory busy: with fewer there is no room beside
_BARRIER_BYTES = 2 * 8
NO_CHOICES = (pointer(None), (0, ctypes.c_int), (0, ctypes.c_int))


@dataclass(frozen=True, slots=True)
class RowsKernel:
    """One compilation: `tile` rows of the matrix times up to `rows` rows.

    Its format: FP8, of which `rounds` rounds x to the precision of e4m3 and `int8` has integers as elements, INT4 with
    `int4_scales` for 256 inputs, which `half_scales` has in float16 and `nvfp4` as elements of e2m1 and scales of a
    byte, and `zeros` zero points beside them, or bfloat16. `parts` of the inputs are multiplied apart. `experts`: of
    many matrices those that rows chose.
    `settles`: what starts behind it finds all complete before it. `beside`: and has room beside it.
    """

    tile: int
    rows: int
    gated: bool
    int4_scales: int = 0
    fp8: bool = False
    parts: int = 1
    experts: bool = False
    settles: bool = False
    rounds: bool = False
    nvfp4: bool = False
    int8: bool = False
    half_scales: bool = False
    zeros: bool = False
    beside: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of inputs in a stage, one for each group of warps: 64 of bfloat16, 128 of FP8, 256 of INT4."""
        return 1 if self.tile > 256 else (256 + self.tile // 2) // self.tile

    @property
    def consumers(self) -> int:
        """Threads that multiply: a warp for 32 rows of the matrix in each group."""
        return self.blocks * self.tile

    @property
    def x_boxes(self) -> int:
        """Boxes of 64 inputs in a block."""
        return 4 if self.int4_scales else 2 if self.fp8 else 1

    @property
    def stage_bytes(self) -> int:
        """Weights, inputs and scales."""
        x = self.blocks * self.x_boxes * 128 * self.rows
        scales = scale_stage_bytes(self.blocks * self.tile // 2, self.int4_scales, nvfp4=self.nvfp4, zeros=self.zeros)
        return -(-(self.consumers * 128 + x + scales) // 1024) * 1024

    @property
    def sums_bytes(self) -> int:
        return (self.blocks - 1) * self.tile * 2 * (self.rows // 8) * 16

    @property
    def chosen_bytes(self) -> int:
        """Of the list of chosen experts: how many, which, and who chose them."""
        return 4 + (4 + self.rows) * CHOSEN_SLOTS if self.experts else 0

    @property
    def stages(self) -> int:
        left, stage = SHARED_BYTES - self.sums_bytes - self.chosen_bytes, self.stage_bytes + _BARRIER_BYTES
        fewer = (left - BESIDE_BYTES) // stage if self.beside else 0
        return fewer if fewer >= LEAST_STAGES else left // stage

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + _BARRIER_BYTES) + self.sums_bytes + self.chosen_bytes

    @property
    def source(self) -> CudaSource:
        defines = {
            "OUTPUTS": self.tile, "ROWS": self.rows, "INT4": self.int4_scales, "FP8": int(self.fp8),
            "GATED": int(self.gated), "SPLIT": int(self.parts > 1), "STAGES": self.stages,
            "EXPERTS": int(self.experts), "SETTLES": int(self.settles or self.beside), "ROUNDS": int(self.rounds),
            **({"NVFP4": 1} if self.nvfp4 else {}), **({"INT8": 1} if self.int8 else {}),
            **({"HALF_SCALES": 1} if self.half_scales else {}), **({"ZEROS": 1} if self.zeros else {}),
        }  # fmt: skip
        entry = "chosen_rows" if self.experts else "linear_rows"
        stated = tuple(f"{name}={value}" for name, value in defines.items())
        return CudaSource("linear_rows_sm90.cu", entry, "sm_90a", stated, self.shared_bytes)


@cache
def kernel_for(
    rows: int,
    matrix_rows: int,
    *,
    gated: bool = False,
    int4_scales: int = 0,
    fp8: bool = False,
    split: bool = False,
    settles: bool = False,
    rounds: bool = False,
    nvfp4: bool = False,
    int8: bool = False,
    half_scales: bool = False,
    zeros: bool = False,
    beside: bool = False,
) -> RowsKernel:
    """The division that gives most multiprocessors work.

    A whole product takes the tile of which there is one for nearly every multiprocessor. Where no tile is such, or with
    parts, it is the largest tile, in as few parts, that leaves few without work; for INT4, which unpacking binds, the
    one that leaves the fewest. INT4 has no tile of 32, which reads x too often.
    """
    bucket = next(most for most in ROWS if rows <= most)

    tiles = TILES[:-1] if int4_scales else TILES

    def used(tile: int, parts: int = 1) -> float:
        return busy(-(-matrix_rows // tile) * parts, MULTIPROCESSORS)

    def one_turn(tile: int) -> bool:
        return matrix_rows <= tile * MULTIPROCESSORS and used(tile) >= LEAST_BUSY_TURN

    parts = 1
    if split:
        divided = [(tile, parts) for parts in PARTS for tile in tiles]
        enough = (each for each in divided if used(*each) >= LEAST_BUSY_SPLIT)
        tile, parts = next(enough, max(reversed(divided), key=lambda each: used(*each)))
    elif fitting := [tile for tile in ONE_TURN_TILES if one_turn(tile)]:
        tile = fitting[0]
    elif int4_scales:
        tile = max(ONE_TURN_TILES, key=used)
    else:
        tile = next((tile for tile in tiles if used(tile) >= LEAST_BUSY), max(reversed(tiles), key=used))
    return RowsKernel(
        tile, bucket, gated, int4_scales, fp8, parts, settles=settles, rounds=rounds, nvfp4=nvfp4, int8=int8,
        half_scales=half_scales, zeros=zeros, beside=beside,
    )  # fmt: skip


def readable(x: Tensor) -> Tensor:
    """Rows of bfloat16 [T, K], K a multiple of 64, as the copy engine reads them: 16 bytes apart. Copied if need be."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def dense_rows(
    x: Tensor, weight: Tensor, *, gated: bool = False, split: bool = False, settles: bool = False, beside: bool = False
) -> Tensor:
    """x [T, K] times the transposed weight [N, K], both bfloat16 -> [T, N].

    `gated`: weight is [2 M, K] and the result gelu(x W_gate) * (x W_up) [T, M], each rounded as by itself. `split`: the
    result may be float32 [P, T, N], whose sum over P it is before it is rounded. `settles` and
    `beside`: of `RowsKernel`.
    """
    rows, inputs = weight.shape
    kernel = kernel_for(x.shape[0], rows, gated=gated, split=split, settles=settles, beside=beside)
    weights = blocks_of(weight, kernel.tile // 2, kernel.blocks)
    return _product(x, weights, weights, kernel, matrix_rows=rows, blocks=inputs // INPUTS)


def int4_rows(
    x: Tensor, matrix: Int4Tiles | Nvfp4Tiles, *, gated: bool = False, split: bool = False, beside: bool = False
) -> Tensor:
    """The same with an INT4 or an NVFP4 matrix; where it has zero points, of a multiple of 16 rows."""
    nvfp4 = isinstance(matrix, Nvfp4Tiles)
    kernel = kernel_for(
        x.shape[0], matrix.rows, int4_scales=matrix.scales.shape[1], gated=gated, split=split, nvfp4=nvfp4,
        half_scales=matrix.scales.dtype is torch.float16,
        zeros=isinstance(matrix, Int4Tiles) and matrix.zero_points is not None, beside=beside,
    )  # fmt: skip
    words, scales = tiled_maps(matrix, kernel.tile // 2, kernel.blocks)
    return _product(
        x, words, scales, kernel, matrix_rows=matrix.rows, blocks=len(matrix.words),
        row_scales=matrix.row_scales if isinstance(matrix, Nvfp4Tiles) else None,
        zeros=zero_maps(matrix, kernel.tile // 2, kernel.blocks),
    )  # fmt: skip


def fp8_rows(x: Tensor, matrix: Fp8Pairs, *, gated: bool = False, split: bool = False, beside: bool = False) -> Tensor:
    """The same with an FP8 matrix that has one scale for each row, and inputs in whole blocks of 128; x rounded to the
    precision of e4m3 where the matrix has it so: ahead, where the kernel is short of time to do it."""
    as_read = matrix.rounds_inputs and x.shape[0] <= ROUNDED_AS_READ
    if matrix.rounds_inputs and not as_read:
        x = rounded_precision(x)
    kernel = kernel_for(x.shape[0], matrix.rows, gated=gated, fp8=True, split=split, rounds=as_read, beside=beside)
    return _eight_bit_product(x, matrix, kernel)


def int8_rows(
    x: Tensor, matrix: Int8Pairs, *, gated: bool = False, split: bool = False, beside: bool = False
) -> Tensor:
    """The same with an INT8 matrix that has one scale for each row."""
    kernel = kernel_for(x.shape[0], matrix.rows, gated=gated, fp8=True, split=split, int8=True, beside=beside)
    return _eight_bit_product(x, matrix, kernel)


def _eight_bit_product(x: Tensor, matrix: Fp8Pairs | Int8Pairs, kernel: RowsKernel) -> Tensor:
    weights, blocks = eight_bit_map(matrix.elements, kernel.tile // 2, kernel.blocks), matrix.elements.shape[1] // 128
    return _product(x, weights, weights, kernel, matrix_rows=matrix.rows, blocks=blocks, row_scales=matrix.scales)


def _product(
    x: Tensor,
    weights: Any,
    scales: Any,
    kernel: RowsKernel,
    *,
    matrix_rows: int,
    blocks: int,
    row_scales: Tensor | None = None,
    zeros: tuple[Any, ...] = (),
) -> Tensor:
    """`blocks` of the matrix's inputs go to stages of `kernel.blocks`."""
    x = readable(x)
    rows, parts = x.shape[0], kernel.parts
    inputs = blocks_of(x, kernel.rows, kernel.blocks * kernel.x_boxes)
    tiles, stages = -(-matrix_rows // kernel.tile), -(-blocks // (kernel.blocks * parts))
    outputs, second = (matrix_rows // 2, matrix_rows // 2) if kernel.gated else (matrix_rows, kernel.tile // 2)
    output = empty_product(x, outputs, parts)
    numbers = (rows, outputs, second, tiles, parts, stages)
    launch(
        kernel.source, grid=(tiles * parts, 1), threads=kernel.consumers + 32,
        arguments=(
            (weights, None), (inputs, None), (scales, None), pointer(row_scales), pointer(output),
            *((number, ctypes.c_int) for number in numbers), *NO_CHOICES, *((each, None) for each in zeros),
        ), resident=1,
    )  # fmt: skip
    return output
