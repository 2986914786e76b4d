"""Products of rows sorted by expert on Hopper: the launch of `grouped_rows_sm90.cu`, over bfloat16 matrices.

Each matrix is read once for every 256 of its expert's rows. Sums run along the inputs in one order, whatever the number
of rows and whoever they stand beside: a row's bits depend on itself and its expert.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.products import (
    GROUPED_ROWS,
    GROUPED_SLICE,
    GROUPED_STAGES,
    GROUPED_TILE,
    grouped_rows_bytes,
)
from modelserve_worker.kernels.cuda_kernel import CudaSource, launch, pointer, tensor_map

TILE, SLICE = GROUPED_TILE, GROUPED_SLICE  # rows of a matrix, and of x of one expert that are multiplied together
THREADS = 384  # of a block: two warpgroups that multiply, and one that loads
_INPUTS = 64  # of a stage: 128 bytes
_BOX = 32  # rows of x that are loaded at a time
_GROUP = GROUPED_ROWS  # rows of a half of a matrix beside as many of the other


def source(*, gated: bool) -> CudaSource:
    """`gated`: output is gelu(first half) * second half."""
    defines = (f"GATED={int(gated)}", f"STAGES={GROUPED_STAGES}")
    return CudaSource("grouped_rows_sm90.cu", "grouped_rows", "sm_90a", defines, grouped_rows_bytes())


def grouped_rows(x: Tensor, matrices: Tensor, ends: Tensor, *, gated: bool = False) -> Tensor:
    """Rows [ends[e - 1], ends[e]) of x [R, K] times matrices[e] [N, K] -> [R, N], or gated [R, N / 2].

    bfloat16, contiguous; ends int32 [E]. Rows from the last end on are undefined.
    """
    (rows, inputs), (experts, matrix_rows, _) = x.shape, matrices.shape
    outputs = matrix_rows // 2 if gated else matrix_rows
    tiles = -(-outputs // (TILE // 2 if gated else TILE))
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    items = tiles * (rows // SLICE + min(experts, rows))  # at most
    blocks = inputs // _INPUTS
    numbers = (experts, outputs, tiles, blocks)
    launch(
        source(gated=gated), grid=(items, 1), threads=THREADS,
        arguments=(
            (_weights(matrices, gated=gated), None), (_boxes(x, _BOX), None), pointer(ends), pointer(output),
            *((number, ctypes.c_int) for number in numbers),
        ), resident=1,
    )  # fmt: skip
    return output


def _weights(matrices: Tensor, *, gated: bool) -> Any:
    """All experts' rows one below the other; gated: groups of rows of the first half beside those of the second."""
    experts, rows, inputs = matrices.shape
    if not gated:
        return _boxes(matrices.view(experts * rows, inputs), TILE)
    row, half = 2 * inputs, rows * inputs  # bytes
    sizes = (inputs, _GROUP, 2, rows // 2 // _GROUP, experts)
    strides = (row, half, _GROUP * row, 2 * half)
    return tensor_map(matrices.data_ptr(), sizes, strides, (_INPUTS, _GROUP, 2, TILE // 2 // _GROUP, 1))


def _boxes(matrix: Tensor, rows: int) -> Any:
    """A matrix [R, K] as stages of 64 inputs of `rows` rows."""
    stride = matrix.stride(0) * matrix.element_size()
    sizes = (_INPUTS, matrix.shape[0], matrix.shape[1] // _INPUTS)
    return tensor_map(matrix.data_ptr(), sizes, (stride, 2 * _INPUTS), (_INPUTS, rows, 1))
