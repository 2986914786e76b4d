"""Products of rows sorted by expert on Hopper: the launch of `grouped_rows_sm90.cu`, over bfloat16 matrices.

Each matrix is read once for every slice of its expert's rows. Sums run along the inputs in one order, whatever the
number of rows and whoever they stand beside: a row's bits depend on itself and its expert.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.products import (
    GROUPED_ROWS,
    GROUPED_STAGES,
    GROUPED_TILE,
    grouped_rows_bytes,
)
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map

TILE = GROUPED_TILE  # rows of a matrix that are multiplied together
THREADS = 384  # of a block: two warpgroups that multiply, and one that loads
_INPUTS = 64  # of a stage: 128 bytes
_BOX = 32  # rows of x that are loaded at a time
_GROUP = GROUPED_ROWS  # rows of a half of a matrix beside as many of the other
_MEAN_ROWS = {8: 128}  # of x that are multiplied together, by an expert's rows on average; more: _MOST_TOGETHER
_MOST_TOGETHER = max(GROUPED_STAGES)


def source(*, gated: bool, together: int) -> CudaSource:
    """`gated`: output is gelu(first half) * second half; `together`: rows of x of a slice at most."""
    defines = (f"GATED={int(gated)}", f"SLICE={together}", f"STAGES={GROUPED_STAGES[together]}")
    return CudaSource("grouped_rows_sm90.cu", "grouped_rows", "sm_90a", defines, grouped_rows_bytes(together))


def rows_together(rows: int, experts: int) -> int:
    """Rows of x of a slice at most: the fewer, the more of the matrices is on its way."""
    return next((taken for mean, taken in _MEAN_ROWS.items() if rows <= mean * experts), _MOST_TOGETHER)


def grouped_rows(x: Tensor, matrices: Tensor, ends: Tensor, *, gated: bool = False) -> Tensor:
    """Rows [ends[e - 1], ends[e]) of x [R, K] times matrices[e] [N, K] -> [R, N], or gated [R, N / 2].

    bfloat16, contiguous; ends int32 [E]. Rows from the last end on are undefined. What is not gated reads the ends
    before the kernel ahead has ended: that one must have settled, as what is gated does, or wait for its own end.
    """
    output, together = _empty_output(x, matrices, gated=gated), rows_together(len(x), len(matrices))
    maps = _maps(x, matrices, together, gated=gated)
    _launch(x, matrices, ends, output, (*maps, *maps), output, (0, 0, 0, 0, 0), together, gated=gated)
    return output


def grouped_rows_beside(
    x: Tensor, matrices: Tensor, ends: Tensor, dense_x: Tensor, dense_matrix: Tensor, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """`grouped_rows`, and in the same launch dense_x [T, K'] times dense_matrix [N', K'] -> [T, N'], or gated
    [T, N' / 2]. K' is a multiple of 64, 512 at least; T and N' are GROUPED_DENSE_ROWS and so many tiles at most."""
    dense_matrices = dense_matrix.unsqueeze(0)
    least = next(each for each in GROUPED_STAGES if each >= len(dense_x))
    together = max(least, rows_together(len(x), len(matrices)))
    output, dense = _empty_output(x, matrices, gated=gated), _empty_output(dense_x, dense_matrices, gated=gated)
    maps = (*_maps(x, matrices, together, gated=gated), *_maps(dense_x, dense_matrices, together, gated=gated))
    (rows, inputs), outputs = dense_x.shape, dense.shape[1]
    turns = -(-inputs // x.shape[1])  # of experts' items while a dense one lasts
    beside = rows, outputs, _tiles(outputs, gated=gated), inputs // _INPUTS, turns
    _launch(x, matrices, ends, output, maps, dense, beside, together, gated=gated)
    return output, dense


def _launch(
    x: Tensor, matrices: Tensor, ends: Tensor, output: Tensor, maps: tuple[Any, ...], dense: Tensor,
    beside: tuple[int, int, int, int, int], together: int, *, gated: bool,
) -> None:  # fmt: skip
    """`beside`: of the dense matrix rows of x, outputs, tiles, blocks of inputs, and turns of others."""
    (rows, inputs), experts, outputs = x.shape, len(matrices), output.shape[1]
    tiles, (_, _, dense_tiles, _, turns) = _tiles(outputs, gated=gated), beside
    items = tiles * (rows // together + min(experts, rows)) + dense_tiles * turns  # at most
    numbers = (experts, outputs, tiles, inputs // _INPUTS, *beside)
    launch(
        source(gated=gated, together=together), grid=(items, 1), threads=THREADS,
        arguments=(
            *((each, None) for each in maps), pointer(ends), pointer(output), pointer(dense),
            *((number, ctypes.c_int) for number in numbers),
        ), resident=1,
    )  # fmt: skip


def _empty_output(x: Tensor, matrices: Tensor, *, gated: bool) -> Tensor:
    outputs = matrices.shape[1] // 2 if gated else matrices.shape[1]
    return torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)


def _tiles(outputs: int, *, gated: bool) -> int:
    return -(-outputs // (TILE // 2 if gated else TILE))


def _maps(x: Tensor, matrices: Tensor, together: int, *, gated: bool) -> tuple[Any, Any]:
    # With few stages on their way the other half of each 256 bytes comes with the first; with more it is 7 % too much.
    return _weights(matrices, gated=gated, promoted=together == _MOST_TOGETHER), _boxes(x, _BOX, promoted=True)


def _weights(matrices: Tensor, *, gated: bool, promoted: bool) -> Any:
    """All experts' rows one below the other; gated: groups of rows of the first half beside those of the second."""
    experts, rows, inputs = matrices.shape
    if not gated:
        return _boxes(matrices.view(experts * rows, inputs), TILE, promoted=promoted)
    row, half = 2 * inputs, rows * inputs  # bytes
    sizes = (inputs, _GROUP, 2, rows // 2 // _GROUP, experts)
    strides, box = (row, half, _GROUP * row, 2 * half), (_INPUTS, _GROUP, 2, TILE // 2 // _GROUP, 1)
    return tensor_map(matrices.data_ptr(), sizes, strides, box, promoted=promoted)


def _boxes(matrix: Tensor, rows: int, *, promoted: bool) -> Any:
    """A matrix [R, K] as stages of 64 inputs of `rows` rows."""
    stride = matrix.stride(0) * matrix.element_size()
    sizes = (_INPUTS, matrix.shape[0], matrix.shape[1] // _INPUTS)
    return tensor_map(matrix.data_ptr(), sizes, (stride, 2 * _INPUTS), (_INPUTS, rows, 1), promoted=promoted)
