"""Products of tens of rows in bfloat16 on Hopper: the launch of `cluster_rows_sm90.cu`.

The matrix is read once. Which block sums what depends on the number of rows and the matrix alone, and sums are added in
one order: the same rows give the same bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.generations import HOPPER, generation_of
from modelserve.sizing.backends.products import CLUSTER_ROWS, CLUSTER_TILE_ROWS, GROUPED_ROWS
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import readable
from modelserve_worker.kernels.products.hopper.matrix_maps import INPUTS, blocks_of

ROWS = (CLUSTER_TILE_ROWS, CLUSTER_ROWS)  # of x that a compiled kernel takes at most
SHARED_BYTES = generation_of(HOPPER).shared_bytes  # of a thread block, at most
TILES = range(32, 257, 32)  # rows of the matrix
AT_ONCE = {1: 132, 2: 132, 3: 117, 4: 120, 5: 110, 6: 102, 7: 105, 8: 120}  # blocks in clusters of so many, on an H200
MET = 7  # what a byte of sums that meet takes, in bytes that are loaded: fitted to what divisions take
_BARRIER_BYTES = 2 * 8


@dataclass(frozen=True, slots=True)
class ClusterKernel:
    """One compilation: `tile` rows of the matrix times up to `rows` rows, by a block for each of `parts`."""

    tile: int
    parts: int
    rows: int
    gated: bool

    def blocks(self, matrix_rows: int) -> int:
        return -(-matrix_rows // self.tile) * self.parts

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup for 64 rows, and a warp that loads."""
        return 2 * self.rows + 32

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tile) * 2 * INPUTS

    @property
    def stages(self) -> int:
        return SHARED_BYTES // (self.stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        sums = self.rows * (self.tile + 8) * 4
        return max(self.stages * self.stage_bytes, sums) + self.stages * _BARRIER_BYTES

    @property
    def source(self) -> CudaSource:
        defines = {
            "ROWS": self.rows, "TILE": self.tile, "PARTS": self.parts, "STAGES": self.stages,
            "GATED": int(self.gated),
        }  # fmt: skip
        stated = tuple(f"{name}={value}" for name, value in defines.items())
        return CudaSource("cluster_rows_sm90.cu", "cluster_rows", "sm_90a", stated, self.shared_bytes)


@cache
def kernel_for(rows: int, matrix_rows: int, inputs: int, *, gated: bool = False) -> ClusterKernel:
    """The division by which a multiprocessor loads the least, and what meets in clusters counts as loads, too.

    Parts of a tile run at once, all tiles do where there are parts. Of 54 matrices and numbers of rows on an H200 it
    takes 0.7 % longer than the fastest of 20 divisions each on average, and at most 6 %.
    """
    bucket = next(most for most in ROWS if rows <= most)

    def cost(kernel: ClusterKernel) -> int:
        turns = -(-kernel.blocks(matrix_rows) // AT_ONCE[kernel.parts])
        loaded = turns * (kernel.tile + bucket) * inputs * 2 // kernel.parts
        return loaded + (MET * bucket * kernel.tile * 4 if kernel.parts > 1 else 0)

    divided = (ClusterKernel(tile, parts, bucket, gated) for parts in AT_ONCE for tile in TILES)
    return min(
        (
            each
            for each in divided
            if each.parts == 1 or (each.blocks(matrix_rows) <= AT_ONCE[each.parts] and each.parts <= inputs // INPUTS)
        ),
        key=cost,
    )


def cluster_rows(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """x [T, K] times the transposed weight [N, K], both bfloat16 -> [T, N].

    `gated`: weight is [2 M, K] and the result gelu(x W_gate) * (x W_up) [T, M], each rounded as by itself.
    """
    x = readable(x)
    rows, inputs = x.shape
    matrix_rows = weight.shape[0]
    kernel = kernel_for(rows, matrix_rows, inputs, gated=gated)
    outputs = matrix_rows // 2 if gated else matrix_rows
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    weights = _gated_blocks(weight, kernel.tile) if gated else blocks_of(weight, kernel.tile, 1)
    launch(
        kernel.source, grid=(kernel.blocks(matrix_rows), 1), threads=kernel.threads,
        arguments=(
            (weights, None), (blocks_of(x, -(-rows // 8) * 8, 1), None), pointer(output),
            *((number, ctypes.c_int) for number in (rows, outputs, inputs // INPUTS)),
        ),
    )  # fmt: skip
    return output


def _gated_blocks(weight: Tensor, tile: int) -> Any:
    """Groups of rows of the first half of a matrix beside those of the second."""
    rows, inputs = weight.shape
    row, half = 2 * inputs, rows * inputs  # bytes
    sizes = (inputs, GROUPED_ROWS, 2, rows // 2 // GROUPED_ROWS, 1)
    strides = (row, half, GROUPED_ROWS * row, 2 * half)
    box = (INPUTS, GROUPED_ROWS, 2, tile // 2 // GROUPED_ROWS, 1)
    return tensor_map(weight.data_ptr(), sizes, strides, box, promoted=False)
