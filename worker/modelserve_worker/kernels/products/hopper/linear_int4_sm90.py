"""Products with INT4 or NVFP4 matrices and many rows on Hopper: the launch of `linear_int4_sm90.cu`.

Which cluster sums what depends on rows, matrix and GPU alone, and sums are added in one order: the same rows give the
same bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import readable
from modelserve_worker.kernels.products.hopper.matrix_maps import tiled_maps, zero_maps
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.linear_tiles import PARTS, SharedBuffers, busy, empty_product
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles

CLUSTER = 2  # thread blocks that share their rows of x
OUTPUTS = 128  # of a tile
THREADS = 384  # of a block: those that multiply, and a warpgroup that loads
COLUMNS = (64, 128)  # rows of x of a tile; with more rows there are several tiles
MANY_COLUMNS = (256, 192, 128)
MOST_SPLIT_ROWS = 64  # of x, up to which parts of sums are left to their reader
LEAST_BUSY = 0.9  # share of the clusters' turns that have work, below which runs begin inside of items
TOGETHER = 8  # slices of rows that have the same tiles at a time, whose weights then come from the cache
_STAGES = {64: (4, 4), 128: (3, 4), 192: (3, 6), 256: (2, 5)}  # of words and scales, of x: in 227 KiB
_CLUSTERS = 66  # on an H100 or an H200; with fewer multiprocessors the last ones begin when others have ended
_BOX_INPUTS = 64  # of x: 128 bytes
_BARRIER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Int4Kernel:
    """One compilation: up to `columns` rows of x a tile, `scales` of 256 inputs; gated and split as `FewRows` says.

    `half_scales`: of INT4, they are float16. `zeros`: its groups have zero points.
    """

    columns: int
    scales: int
    gated: bool
    split: bool
    nvfp4: bool = False
    half_scales: bool = False
    zeros: bool = False

    @property
    def x_boxes(self) -> int:
        """Boxes of 64 inputs in a stage of x."""
        return 1 if self.columns > 128 else 2 if self.columns == 128 else 4

    @property
    def x_box(self) -> tuple[int, int, int]:
        """What one of a cluster's blocks loads for both: half of the boxes or, of one box, half of the rows."""
        whole = self.x_boxes > 1
        return _BOX_INPUTS, self.columns // (1 if whole else CLUSTER), self.x_boxes // CLUSTER if whole else 1

    @property
    def shared_bytes(self) -> int:
        words, x = _STAGES[self.columns]
        halves = 2 if self.gated else 1
        zeros = halves * -(-OUTPUTS // halves * ((self.scales + 1) // 2) // 128) * 128 if self.zeros else 0
        word_stage = -(-(OUTPUTS * (128 + self.scales * (1 if self.nvfp4 else 2)) + zeros) // 1024) * 1024
        staged = 2 * 64 * 128 if self.columns >= 128 else 0
        rings = words * word_stage + x * self.x_boxes * self.columns * 128
        return rings + staged + 2 * (words + x) * _BARRIER_BYTES

    @property
    def source(self) -> CudaSource:
        words, x = _STAGES[self.columns]
        defines = {
            "COLUMNS": self.columns, "SCALES": self.scales, "GATED": int(self.gated), "SPLIT": int(self.split),
            "W_STAGES": words, "X_STAGES": x, **({"NVFP4": 1} if self.nvfp4 else {}),
            **({"HALF_SCALES": 1} if self.half_scales else {}), **({"ZEROS": 1} if self.zeros else {}),
        }  # fmt: skip
        stated = tuple(f"{name}={value}" for name, value in defines.items())
        return CudaSource("linear_int4_sm90.cu", "linear_int4", "sm_90a", stated, self.shared_bytes)


@dataclass(frozen=True, slots=True)
class Division:
    """How a product is dealt out: the numbers of `Work` in `tile_sums_sm90.cuh`.

    Items are `pairs` of tiles by `slices` of rows, or by `parts` of the inputs, and have `blocks` of 256 inputs each.
    """

    columns: int
    parts: int
    pairs: int
    slices: int
    blocks: int
    waves: int
    clusters: int
    grain: int

    @property
    def items(self) -> int:
        return self.pairs * self.slices

    @property
    def together(self) -> int:
        return 1 if self.parts > 1 else min(TOGETHER, self.slices)


@cache
def division(rows: int, outputs: int, blocks: int, *, split: bool, clusters: int = _CLUSTERS) -> Division:
    """Of a matrix of `outputs` rows and `blocks` blocks of inputs, over at most `clusters` clusters."""
    columns = next((most for most in COLUMNS if rows <= most), None)
    columns = columns or min(MANY_COLUMNS, key=lambda each: -(-rows // each) * each)
    pairs, slices = -(-outputs // (CLUSTER * OUTPUTS)), -(-rows // columns)
    if split and rows <= MOST_SPLIT_ROWS:
        enough = (each for each in PARTS if busy(pairs * each, clusters) >= LEAST_BUSY)
        parts = next(enough, max(PARTS, key=lambda each: busy(pairs * each, clusters)))
        if parts > 1:
            of_part = -(-blocks // parts)
            return Division(columns, parts, pairs, parts, of_part, 0, min(pairs * parts, clusters), of_part)
    items = pairs * slices
    if busy(items, clusters) >= LEAST_BUSY:
        used, grain = min(items, clusters), blocks
    else:
        used, grain = max(1, min(clusters, items * blocks // 2)), 1
    return Division(columns, 1, pairs, slices, blocks, max(0, items // used - 1), used, grain)


def int4_product(
    x: Tensor, matrix: Int4Tiles | Nvfp4Tiles, *, shared: SharedBuffers, gated: bool = False, split: bool = False
) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix [N, K] -> [T, N].

    `gated`: the result is gelu(x W_gate) * (x W_up) [T, N / 2], each rounded as by itself. `split`: it may be float32
    [P, T, N], whose sum over P it is before it is rounded.
    """
    x = readable(x)
    (rows, inputs), outputs = x.shape, matrix.rows
    work = division(rows, outputs, len(matrix.words), split=split)
    row_scales = matrix.row_scales if isinstance(matrix, Nvfp4Tiles) else None
    kernel = Int4Kernel(
        work.columns, matrix.scales.shape[1], gated, work.parts > 1, nvfp4=row_scales is not None,
        half_scales=matrix.scales.dtype is torch.float16,
        zeros=isinstance(matrix, Int4Tiles) and matrix.zero_points is not None,
    )  # fmt: skip
    of_half = OUTPUTS // 2 if gated else OUTPUTS
    words, scales = tiled_maps(matrix, of_half, 1)
    x_map = tensor_map(
        x.data_ptr(), (_BOX_INPUTS, rows, inputs // _BOX_INPUTS), (2 * x.stride(0), 2 * _BOX_INPUTS), kernel.x_box
    )
    written = outputs // 2 if gated else outputs
    output = empty_product(x, written, work.parts)
    sums = shared.split_sums
    numbers = (
        rows, written, outputs // 2, work.pairs, work.slices, work.together, work.blocks, work.items, work.waves,
        work.clusters, work.grain,
    )  # fmt: skip
    launch(
        kernel.source, grid=(work.clusters * CLUSTER, 1), threads=THREADS,
        arguments=(
            (words, None), (scales, None), (x_map, None), pointer(output), pointer(sums.parts),
            pointer(sums.arrivals), *((number, ctypes.c_int) for number in numbers),
            *(() if row_scales is None else (pointer(row_scales),)),
            *((each, None) for each in zero_maps(matrix, of_half, 1)),
        ),
    )  # fmt: skip
    return output
