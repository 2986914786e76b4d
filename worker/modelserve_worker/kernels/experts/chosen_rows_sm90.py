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
    INPUTS,
    MULTIPROCESSORS,
    RowsKernel,
    blocks_of,
)

TILES = (192, 160, 128, 96, 64)  # rows of a matrix, by preference


@cache
def kernel_for(matrix_rows: int, top_k: int, *, gated: bool) -> RowsKernel:
    """Of tiles the one with which one row's experts keep most multiprocessors at work."""

    def share(tile: int) -> float:
        tiles = top_k * -(-matrix_rows // tile)
        return top_k * matrix_rows / (-(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS * tile)

    return RowsKernel(max(TILES, key=share), CHOSEN_ROWS, gated, experts=True, settles=gated)


def chosen_products(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
    """`ExpertBackend.chosen_products` of x bfloat16 [T, H], T <= CHOSEN_ROWS and T k <= CHOSEN_SLOTS; H and I are
    multiples of 64."""
    inner = _product(x, choice, gate_up, gated=True)
    return _product(inner, choice, down, gated=False)


def _product(x: Tensor, choice: Choice, matrices: Tensor, *, gated: bool) -> Tensor:
    """x [T, K] -> [T k, T, N / 2], each chosen expert's products with all rows, as many as there are; or x like that ->
    [T k, N], by slots."""
    (rows, top_k), (experts, matrix_rows, inputs) = choice.experts.shape, matrices.shape
    kernel = kernel_for(matrix_rows, top_k, gated=gated)
    slots, outputs = rows * top_k, matrix_rows // 2 if gated else matrix_rows
    second = outputs if gated else kernel.tile // 2
    shape = (slots, rows, outputs) if gated else (slots, outputs)
    output = torch.empty(shape, dtype=x.dtype, device=x.device)
    weights = blocks_of(matrices.view(experts * matrix_rows, inputs), kernel.tile // 2, kernel.blocks)
    rows_of_x = blocks_of(x.view(-1, inputs), kernel.rows, kernel.blocks)
    tiles, stages = -(-matrix_rows // kernel.tile), -(-inputs // (INPUTS * kernel.blocks))
    numbers = (rows, outputs, second, tiles, 1, stages)
    launch(
        kernel.source, grid=(tiles * slots, 1), threads=kernel.consumers + 32,
        arguments=(
            (weights, None), (rows_of_x, None), (weights, None), pointer(None), pointer(output),
            *((number, ctypes.c_int) for number in numbers), pointer(choice.experts), (top_k, ctypes.c_int),
            (experts, ctypes.c_int),
        ), resident=1,
    )  # fmt: skip
    return output
