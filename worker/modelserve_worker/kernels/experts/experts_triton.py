"""Triton kernels of a mixture of experts: products of few rows with the experts they chose, and the sum at its end.

`experts` has the interface. Weights are the left operand, [BLOCK_N, BLOCK_K], times BLOCK_M rows. A program belongs to
one expert and reads its block of the matrix once for every BLOCK_M rows that chose it, which it finds itself in the
step's choices: nothing is sorted, and each result is written by one program, so the same call gives the same bits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.elementwise.elementwise_triton import gelu, least_many, load_row, rms, row_launch
from modelserve_worker.kernels.experts import dealing_triton, routing_triton
from modelserve_worker.kernels.experts.experts import (
    AddedNorms,
    BranchMatrices,
    BranchNorms,
    Choice,
    DealtRows,
    Routed,
    RouterWeights,
    Shares,
)
from modelserve_worker.kernels.experts.routing_triton import MOST_ARRIVALS, NOBODY, OPERAND


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Block of one program: `outputs` rows of the matrix by `inputs` of its columns, times `rows` rows."""

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int


# Tiles of gate and up, and of down, by the most rows of a step, up to what the table of kernels gives them.
TILES = {
    1: (ExpertTile(16, 128, 8, 1, 5), ExpertTile(64, 64, 8, 4, 4)),
    8: (ExpertTile(32, 128, 8, 2, 4), ExpertTile(16, 64, 8, 1, 6)),
    64: (ExpertTile(16, 128, 8, 1, 5), ExpertTile(64, 128, 8, 4, 3)),
}


@triton.jit
def block_products(
    x_at,  # [1, BLOCK_M], first elements of the rows
    wanted,  # [1, BLOCK_M]
    matrix_at,  # [BLOCK_N, 1], first elements of the matrix's rows
    INPUTS: tl.constexpr,
    UP: tl.constexpr,  # elements from these rows to those of a second product, 0: none
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Two of float32 [BLOCK_N, BLOCK_M]."""
    BLOCK_N: tl.constexpr = matrix_at.shape[0]
    BLOCK_M: tl.constexpr = x_at.shape[1]
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        inside = first + k < INPUTS
        at = matrix_at + first + k[None, :]
        elements = tl.load(at, mask=inside[None, :], other=0.0)
        if UP:
            others = tl.load(at + UP, mask=inside[None, :], other=0.0)
        values = tl.load(x_at + first + k[:, None], mask=wanted & inside[:, None], other=0.0).to(OPERAND)
        total = tl.dot(elements.to(OPERAND), values, total)
        if UP:
            second = tl.dot(others.to(OPERAND), values, second)
    return total, second


@triton.jit(do_not_specialize=["rows"])
def chosen_products(
    x,  # GATED: [rows, INPUTS], else [rows K, INPUTS]
    matrices,  # [EXPERTS, (2 if GATED) OUTPUTS, INPUTS]
    experts,  # int32 [rows, K]
    results,  # [rows K, OUTPUTS]
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two from rows on
    GATED: tl.constexpr,
    BY_SLOT: tl.constexpr,  # the second dimension of the grid is of slots, the first of an expert's computing it
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    member = tl.program_id(1)
    dtype = results.dtype.element_ty
    row, choice = tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(K))
    slots = row[:, None] * K + choice[None, :]
    known = (row < rows)[:, None] & (choice < K)[None, :]
    chosen = tl.load(experts + slots, mask=known, other=NOBODY)
    expert = tl.load(experts + member) if BY_SLOT else member
    mine = (chosen == expert) & (expert < EXPERTS)
    if BY_SLOT:
        first_slot = tl.min(tl.min(tl.where(mine, slots, NOBODY), axis=1), axis=0)
        mine = mine & (first_slot == member)
    takes = tl.sum(mine.to(tl.int32), axis=1)  # 0 or 1: a row chooses an expert once
    slot_of_row = tl.sum(tl.where(mine, slots, 0), axis=1)
    rank = tl.cumsum(takes, 0) - takes
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = tl.minimum(n, OUTPUTS - 1)
    matrix = matrices + expert.to(tl.int64) * ((2 if GATED else 1) * OUTPUTS * INPUTS)
    matrix_at = matrix + stored[:, None] * INPUTS
    count = tl.sum(takes)
    for begin in range(0, count, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        taken = (takes > 0)[:, None] & (rank[:, None] == m[None, :])
        slot = tl.sum(tl.where(taken, slot_of_row[:, None], 0), axis=0)
        wanted = (m < count)[None, :]
        source = slot // K if GATED else slot
        x_at = x + source[None, :] * INPUTS
        UP: tl.constexpr = OUTPUTS * INPUTS if GATED else 0
        total, up = block_products(x_at, wanted, matrix_at, INPUTS, UP, BLOCK_K, STAGES)
        if GATED:
            opened = gelu(total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            total = opened * up.to(dtype).to(tl.float32)
        at = results + slot[None, :] * OUTPUTS + n[:, None]
        tl.store(at, total.to(dtype), mask=wanted & (n < OUTPUTS)[:, None])


@triton.jit
def shares_of(choice, row, K: tl.constexpr):
    """Of each of a row's slots whether it chose an expert, and its weight. Past the first cache: it may be early."""
    shares = ()
    for number in tl.static_range(K):
        slot = row * K + number
        chosen = tl.load(choice.experts + slot, cache_modifier=".cg") != NOBODY
        weight = tl.load(choice.weights + slot, mask=chosen, other=0.0, cache_modifier=".cg")
        shares = shares + ((chosen, weight),)  # noqa: RUF005 - Triton unpacks nothing
    return shares


@triton.jit
def routed_row(routed, places, shares, row, column, WIDTH: tl.constexpr, K: tl.constexpr):
    """One row [BLOCK] of `routed` as float32, or with K shares the sum of its slots' rows, rounded once."""
    inside = column < WIDTH
    if K == 0:
        total = tl.load(routed + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([column.shape[0]], tl.float32)
        for choice in tl.static_range(K):
            slot = row * K + choice
            chosen = shares[choice][0]
            place = slot if places is None else tl.load(places + slot, mask=chosen, other=0).to(tl.int64)
            part = tl.load(routed + place * WIDTH + column, mask=inside & chosen, other=0.0).to(tl.float32)
            total += part * shares[choice][1]
        total = total.to(routed.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def weighted_sum(routed, places, choice: Choice, summed, WIDTH: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = routed_row(routed, places, shares_of(choice, row, K), row, column, WIDTH, K)
    tl.store(summed + row * WIDTH + column, total.to(summed.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def add_branches(
    residual,  # [rows, WIDTH], also the place of the sum
    dense,
    routed,
    places,  # or None, as of `routed_row`
    choice: Choice,  # or None
    dense_weight,
    routed_weight,
    added_weight,
    scalar,  # [1] or None
    next_weight,  # [WIDTH] or None
    normed,  # [rows, WIDTH], or None without a next_weight
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    SETTLED: tl.constexpr,  # all but `routed` is complete before this starts
):
    launch_dependents()
    dtype = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    first_weights = load_row(dense_weight, column, WIDTH)
    second_weights = load_row(routed_weight, column, WIDTH)
    added_weights = load_row(added_weight, column, WIDTH)
    if next_weight is not None:
        next_weights = load_row(next_weight, column, WIDTH)
    if scalar is not None:
        factor = tl.load(scalar).to(tl.float32)
    if not SETTLED:
        wait_for_prerequisites()
    shares = shares_of(choice, row, K)
    first = tl.load(dense + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    kept = tl.load(residual + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    left = rms(first[None, :], first_weights, WIDTH, eps).to(dtype).to(tl.float32)
    if SETTLED:
        wait_for_prerequisites()
    second = routed_row(routed, places, shares, row, column, WIDTH, K)
    right = rms(second[None, :], second_weights, WIDTH, eps).to(dtype).to(tl.float32)
    delta = (left + right).to(dtype).to(tl.float32)
    summed = (kept[None, :] + rms(delta, added_weights, WIDTH, eps).to(dtype).to(tl.float32)).to(dtype)
    if scalar is not None:
        summed = (summed.to(tl.float32) * factor).to(dtype)
    tl.store(residual + at[None, :], summed, mask=inside[None, :])
    if next_weight is not None:
        after = rms(summed.to(tl.float32), next_weights, WIDTH, eps).to(dtype)
        tl.store(normed + at[None, :], after, mask=inside[None, :])


class TritonExperts:
    """The operations on a CUDA device, for bfloat16. `add_branches` writes the sum in the residual's place. `exact`: a
    row is added up in one order, that of many rows, however many there are.

    Up to `streamed_rows` rows the products are Hopper's, which begin before the kernel ahead has ended
    (`chosen_rows_sm90`), and so does the sum behind them.
    """

    def __init__(self, device: torch.device, *, exact: bool = False, streamed_rows: int = 0) -> None:
        self._exact = exact
        self._streamed_rows = streamed_rows
        # Made here and not in a step, which may be being captured. Launches follow one another: all layers share it.
        self._arrivals = torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=device)

    def route(
        self, x: Tensor, router: RouterWeights, norm_weight: Tensor, *, eps: float, num_rows: Tensor | None
    ) -> Routed:
        return routing_triton.route(
            x, router, norm_weight, self._arrivals, eps=eps, num_rows=num_rows, exact=self._exact
        )

    def add_and_route(
        self,
        residual: Tensor,
        delta: Tensor,
        norms: AddedNorms,
        router: RouterWeights,
        *,
        eps: float,
        num_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Routed]:
        return routing_triton.add_and_route(
            residual, delta, norms, router, self._arrivals, eps=eps, num_rows=num_rows, exact=self._exact
        )

    def deal(self, x: Tensor, choice: Choice, experts: int) -> DealtRows:
        return dealing_triton.deal(x, choice, experts)

    def chosen_products(self, x: Tensor, choice: Choice, gate_up: Any, down: Any) -> Tensor:
        if x.shape[0] <= self._streamed_rows:
            from modelserve_worker.kernels.experts import chosen_rows_sm90

            return chosen_rows_sm90.chosen_products(x, choice, gate_up, down)
        most = next(most for most in TILES if x.shape[0] <= most)
        inner = products_with(x, choice, gate_up, TILES[most][0], gated=True)
        return products_with(inner, choice, down, TILES[most][1], gated=False)

    def branch_products(self, x: Tensor, routed: Routed, matrices: BranchMatrices) -> tuple[Tensor, Shares]:
        """Of at most GROUPED_DENSE_ROWS rows, on Hopper."""
        from modelserve_worker.kernels.experts.grouped_rows_sm90 import grouped_rows_beside

        dealt = dealing_triton.deal_together(routed.normed, routed.choice, len(matrices.gate_up))
        inner, opened = grouped_rows_beside(
            dealt.rows, matrices.gate_up, dealt.ends, x, matrices.dense_gate_up, gated=True
        )
        results, dense = grouped_rows_beside(inner, matrices.down, dealt.ends, opened, matrices.dense_down, gated=False)
        return dense, Shares(results, routed.choice, dealt.places)

    def weighted_sum(self, shares: Shares) -> Tensor:
        (rows, top_k), width = shares.choice.weights.shape, shares.results.shape[1]
        summed = torch.empty((rows, width), dtype=shares.results.dtype, device=shares.results.device)
        launch(
            weighted_sum, (rows,), shares.results, shares.places, shares.choice, summed,
            **_sum_launch(width, rows, top_k, exact=self._exact),
        )  # fmt: skip
        return summed

    def add_branches(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Shares | Tensor,
        norms: BranchNorms,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        rows, width = residual.shape
        normed = None if next_weight is None else torch.empty_like(residual)
        results, places, choice, top_k, settled = routed, None, None, 0, False
        if isinstance(routed, Shares):
            results, places, choice = routed.results, routed.places, routed.choice
            top_k, settled = choice.experts.shape[1], places is None and rows <= self._streamed_rows
        launch(
            add_branches, (rows,),
            residual, dense, results, places, choice, norms.dense, norms.routed, norms.added, scalar, next_weight,
            normed, eps, SETTLED=settled, **_sum_launch(width, rows, top_k, exact=self._exact),
        )  # fmt: skip
        return residual, normed


def products_with(x: Tensor, choice: Choice, matrices: Tensor, tile: ExpertTile, *, gated: bool) -> Tensor:
    """One of the two products of each slot, with the tile given: [T k, I] of x [T, H], or [T k, H] of x [T k, I]."""
    (rows, top_k), (experts, outputs, inputs) = choice.experts.shape, matrices.shape
    outputs = outputs // 2 if gated else outputs
    results = torch.empty((rows * top_k, outputs), dtype=x.dtype, device=x.device)
    block = _product_launch(tile, rows=rows, top_k=top_k, experts=experts, gated=gated)
    members = rows * top_k if block["BY_SLOT"] else experts
    launch(
        chosen_products,
        (triton.cdiv(outputs, tile.outputs), members),
        x,
        matrices,
        choice.experts,
        results,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        **block,
    )
    return results


def _product_launch(tile: ExpertTile, *, rows: int, top_k: int, experts: int, gated: bool) -> dict[str, Any]:
    return {
        "EXPERTS": experts, "K": top_k, "ROWS": triton.next_power_of_2(max(rows, tile.rows)), "GATED": gated,
        "BY_SLOT": rows * top_k <= experts, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs, "BLOCK_M": tile.rows,
        "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip


def _sum_launch(width: int, rows: int, top_k: int, *, exact: bool = False) -> dict[str, int]:
    block = row_launch(width, many=rows >= least_many(exact=exact))
    return {"WIDTH": width, "BLOCK": block["BLOCK"], "K": top_k, "num_warps": block["num_warps"]}
