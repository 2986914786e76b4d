"""Products of few rows with the experts they chose, on Hopper: launches of `linear_rows_sm90.cu` over many matrices.

Which experts is read before the kernel ahead has ended, so that their matrices stream while it ends. So between the
router and the first product there must be a kernel that settles (`dependent_launch`). The first product does, too.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from modelserve.sizing.backends.products import CHOSEN_ROWS
from modelserve_worker.kernels.compiling.cuda_kernel import launch, pointer
from modelserve_worker.kernels.experts.experts import Choice
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import (
    MULTIPROCESSORS,
    RowsKernel,
)
from modelserve_worker.kernels.products.hopper.matrix_maps import INPUTS, blocks_of, tiled_maps
from modelserve_worker.kernels.products.nvfp4_linear import GROUPS, Nvfp4Tiles

ExpertMatrices = Tensor | Nvfp4Tiles
TILES = (192, 160, 128, 96, 64)  # rows of a matrix, by preference


@cache
def kernel_for(matrix_rows: int, top_k: int, *, gated: bool, nvfp4: bool = False) -> RowsKernel:
    """Of tiles the one with which one row's experts keep most multiprocessors at work."""

    def share(tile: int) -> float:
        tiles = top_k * -(-matrix_rows // tile)
        return top_k * matrix_rows / (-(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS * tile)

    scales = GROUPS if nvfp4 else 0
    return RowsKernel(max(TILES, key=share), CHOSEN_ROWS, gated, scales, experts=True, settles=gated, nvfp4=nvfp4)


def chosen_products(x: Tensor, choice: Choice, gate_up: ExpertMatrices, down: ExpertMatrices) -> Tensor:
    """`ExpertBackend.chosen_products` of x bfloat16 [T, H], T <= CHOSEN_ROWS and T k <= CHOSEN_SLOTS; H and I are
    multiples of 64."""
    inner = _product(x, choice, gate_up, gated=True)
    return _product(inner, choice, down, gated=False)


def _product(x: Tensor, choice: Choice, matrices: ExpertMatrices, *, gated: bool) -> Tensor:
    """x [T, K] -> [T k, T, N / 2], each chosen expert's products with all rows, as many as there are; or x like that ->
    [T k, N], by slots."""
    (rows, top_k), inputs, nvfp4 = choice.experts.shape, x.shape[-1], isinstance(matrices, Nvfp4Tiles)
    held = matrices.words if isinstance(matrices, Nvfp4Tiles) else matrices
    experts, matrix_rows = held.shape[0], held.shape[-2]
    kernel = kernel_for(matrix_rows, top_k, gated=gated, nvfp4=nvfp4)
    slots, outputs = rows * top_k, matrix_rows // 2 if gated else matrix_rows
    second = outputs if gated else kernel.tile // 2
    shape = (slots, rows, outputs) if gated else (slots, outputs)
    output = torch.empty(shape, dtype=x.dtype, device=x.device)
    if isinstance(matrices, Nvfp4Tiles):
        blocks, row_scales = matrices.words.shape[1], matrices.row_scales
        weights, scales = tiled_maps(matrices, kernel.tile // 2, kernel.blocks)
    else:
        blocks, row_scales = inputs // INPUTS, None
        weights = blocks_of(matrices.view(experts * matrix_rows, inputs), kernel.tile // 2, kernel.blocks)
        scales = weights
    rows_of_x = blocks_of(x.view(-1, inputs), kernel.rows, kernel.blocks * kernel.x_boxes)
    tiles, stages = -(-matrix_rows // kernel.tile), -(-blocks // kernel.blocks)
    numbers = (rows, outputs, second, tiles, blocks if nvfp4 else 1, stages)
    launch(
        kernel.source, grid=(tiles * slots, 1), threads=kernel.consumers + 32,
        arguments=(
            (weights, None), (rows_of_x, None), (scales, None), pointer(row_scales), pointer(output),
            *((number, ctypes.c_int) for number in numbers), pointer(choice.experts), (top_k, ctypes.c_int),
            (experts, ctypes.c_int),
        ), resident=1,
    )  # fmt: skip
    return output
