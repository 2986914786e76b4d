"""Launches that Triton's products of all formats have in common: by a tile, grouped by expert, over dequantised blocks.

`matrix` is what a kernel takes of the matrix, and `inputs` are its sizes behind the outputs: the inputs, and for some
formats how many of them are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import dequantised_rows
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.products.linear_tiles import LinearTile, SharedBuffers

DEQUANTISED_OUTPUTS = 32  # of one program


def contiguous_rows(x: Tensor) -> Tensor:
    """x [T, K] whose rows are each in one piece. Copied if need be."""
    return x if x.stride(1) == 1 else x.contiguous()


def fused_product(
    kernel: Any,
    x: Tensor,
    matrix: Sequence[Any],
    tile: LinearTile,
    *,
    outputs: int,
    inputs: Sequence[int],
    tiles: int,
    shared: SharedBuffers,
    **constants: Any,
) -> Tensor:
    """x [T, K] bfloat16 times the transposed matrix -> [T, outputs]. `tiles` of inputs may be split over programs."""
    x, rows = contiguous_rows(x), x.shape[0]
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    splits = tile.splits(rows=rows, outputs=outputs, tiles=tiles)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), splits
    launch(
        kernel, grid,
        x, x.stride(0), *matrix, output, shared.split_sums, rows, outputs, *inputs, splits, SPLIT=splits > 1,
        **tile.constants, **constants,
    )  # fmt: skip
    return output


def grouped_product(
    kernel: Any,
    x: Tensor,
    matrix: Sequence[Any],
    ends: Tensor,
    tile: LinearTile,
    *,
    outputs: int,
    inputs: Sequence[int],
    **constants: Any,
) -> Tensor:
    """A grouped `Product`. Each expert's matrix is read once for every block of its rows."""
    x, experts = contiguous_rows(x), len(ends)
    output = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    grid = triton.cdiv(outputs, tile.outputs), experts, tile.parts(rows=x.shape[0], experts=experts)
    launch(
        kernel, grid, x, x.stride(0), *matrix, output, ends, outputs, *inputs, **tile.constants, **constants
    )  # fmt: skip
    return output


def dequantised_product(
    kernel: Any,
    x: Tensor,
    matrix: Sequence[Any],
    *,
    outputs: int,
    inputs: int,
    tiles: int,
    shared: SharedBuffers,
    **constants: Any,
) -> Tensor:
    """`fused_product` by cuBLAS, block by block of the matrix's rows, each dequantised into one buffer."""
    output = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    most = dequantised_rows(rows=outputs, inputs=inputs, block_bytes=shared.dequantised_block.nbytes)
    elements = shared.dequantised_block[: most * inputs].view(most, inputs)
    for first in range(0, outputs, most):
        last = min(first + most, outputs)
        launch(
            kernel, (triton.cdiv(last - first, DEQUANTISED_OUTPUTS), tiles),
            *matrix, elements, first, last, outputs, inputs, BLOCK_N=DEQUANTISED_OUTPUTS, num_warps=4, **constants,
        )  # fmt: skip
        torch.mm(x, elements[: last - first].t(), out=output[:, first:last])
    return output
