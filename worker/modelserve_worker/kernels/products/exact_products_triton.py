"""Triton kernel of the profile `exact`: products of bfloat16 or float32 matrices with any number of rows, dense or by
expert.

Weights are the left operand, so a row of inputs is a column of the matrix units, whose sums know nothing of the columns
beside it. Each output is one chain of sums over K, from its first input to its last, in one program and one
accumulator: no splits. So the tiles below, for few rows and for many, add in one order; `check_places` tries it at the
start.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.products.linear_tiles import MANY, LinearTile
from modelserve_worker.kernels.products.row_blocks import plain_product
from modelserve_worker.kernels.products.split_inputs import expert_rows, store_product
from modelserve_worker.kernels.products.tiled_products import contiguous_rows

# By the most rows they are for. Those for few load far ahead: they have too few programs to keep memory busy else.
TILES = {
    16: LinearTile(64, 16, 4, 8, 0),
    32: LinearTile(64, 32, 4, 8, 0),
    192: LinearTile(64, 64, 4, 6, 0),
    MANY: LinearTile(128, 128, 8, 3, 0),
}
TILE_INPUTS = 64
ROW_BLOCKS_TOGETHER = 8  # which read a block of weights from the L2 cache one after the other


@triton.jit
def chain_of_sums(x, x_stride, weight, m, n, rows, N, K, WHOLE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Float32 [BLOCK_N, BLOCK_M] of weight [N, K] and rows m of x. Rows n may lie past the end: the last stands in."""
    k = tl.arange(0, BLOCK_K)
    weights_at = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    wanted = (m < rows)[None, :]
    total = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    for first in range(0, K, BLOCK_K):
        if WHOLE:
            weights = tl.load(weights_at + first)
            inputs = tl.load(x_at + first, mask=wanted, other=0.0)
        else:
            weights = tl.load(weights_at + first, mask=(first + k < K)[None, :], other=0.0)
            inputs = tl.load(x_at + first, mask=wanted & (first + k < K)[:, None], other=0.0)
        total = tl.dot(weights, inputs, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def exact_product(
    x,  # [rows, K]
    x_stride,
    weight,  # [N, K]
    output,  # [rows, N]
    rows,
    N,
    K,
    WHOLE: tl.constexpr,  # K is a multiple of BLOCK_K
    TOGETHER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    program, row_blocks, column_blocks = tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (TOGETHER * column_blocks)
    together = tl.minimum(row_blocks - group * TOGETHER, TOGETHER)
    place = program % (TOGETHER * column_blocks)
    m = (group * TOGETHER + place % together) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // together * BLOCK_N + tl.arange(0, BLOCK_N)
    total = chain_of_sums(x, x_stride, weight, m, n, rows, N, K, WHOLE, BLOCK_K)
    store_product(total, output, m, n, rows, N, None, None, 0, 0, 1, False)


@triton.jit
def exact_expert_products(
    x,  # [R, K], rows of one expert beside one another
    x_stride,
    weights,  # [E, N, K]
    output,  # [R, N]
    ends,  # of each expert's rows
    N,
    K,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    column_block, expert, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = expert_rows(ends, expert)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    weights += expert.to(tl.int64) * N * K
    for first in range(begin + part * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        total = chain_of_sums(x, x_stride, weights, m, n, end, N, K, WHOLE, BLOCK_K)
        store_product(total, output, m, n, end, N, None, None, 0, 0, 1, False)


class TritonExactProducts:
    """`ElementProducts` on a GPU."""

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        x = contiguous_rows(x)
        (outputs, inputs), rows = weight.shape, x.shape[0]
        result = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        tile = _tile(rows)
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)
        launch(
            exact_product, grid, x, x.stride(0), weight, result, rows, outputs, inputs, TOGETHER=ROW_BLOCKS_TOGETHER,
            **_constants(tile, inputs),
        )  # fmt: skip
        return result

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        experts, outputs, inputs = weights.shape
        result = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
        tile = _tile(x.shape[0] // experts)
        parts = tile.parts(rows=x.shape[0], experts=experts)
        launch(
            exact_expert_products, (triton.cdiv(outputs, tile.outputs), experts, parts),
            x, x.stride(0), weights, result, ends, outputs, inputs, **_constants(tile, inputs),
        )  # fmt: skip
        return result


class TritonGroupedProducts(TritonExactProducts):
    """Of experts as above, others by PyTorch: where PyTorch's grouped product would wait for the device."""

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        return plain_product(x, weight)


def _tile(rows: int) -> LinearTile:
    return next(tile for most, tile in TILES.items() if rows <= most)


def _constants(tile: LinearTile, inputs: int) -> dict[str, Any]:
    return {
        "WHOLE": inputs % TILE_INPUTS == 0, "BLOCK_N": tile.outputs, "BLOCK_M": tile.rows, "BLOCK_K": TILE_INPUTS,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
