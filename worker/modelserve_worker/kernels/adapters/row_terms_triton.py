"""The additive term of adapters of few rows in Triton: A x while the base product runs, B times that where it is read.

A step of few rows has a few rows of each adapter, and is bound by launches and what they wait for, not by arithmetic.
A x is summed in many pieces, each of one product of matrices. Where the product ahead settles (`dependent_launch`) and
leaves room on its multiprocessors, all of them are summed while it streams its matrix: what they read is complete, and
what they write nobody has. B times that is left to the kernel that reads the product, whose programs hold their part of
B in registers before the sums are there; or, where that would be too much for them, has a launch that adds it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, few_split_inputs
from modelserve_worker.kernels.adapters.factor_tiles import columns_together, padded_rank, precision
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, FewRows, RowTerm, SlotFactors
from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites

_MOST_OUTPUTS, _FACTOR_ELEMENTS = 1024, 16384  # of one program, which holds B of its outputs
_READERS_RANK = 16  # that kernels which read a product hold of B
_LEAST_NORMED, _MOST_NORMED = 513, 4096  # outputs of a row that one program norms, and holds B of


@bundle
class Term(NamedTuple):
    """`RowTerm`, as a kernel takes it that reads the product."""

    sums: Tensor
    weight: Tensor  # B
    weight_stride: int
    scales: Tensor
    scale_stride: int
    row_slots: Tensor
    step_rows: int
    SPLITS: tl.constexpr
    PARTS: tl.constexpr
    RANK: tl.constexpr
    PADDED: tl.constexpr


@bundle
class PartEnds(NamedTuple):
    """Where the parts of a matrix end, at most three."""

    first: int
    second: int
    third: int


@triton.jit
def term_factor(term: Term, slot, output, inside):
    """B of outputs [N] or [M, N] in a slot, [..., PADDED]: a weight, which may be read before the kernel ahead has
    ended."""
    rank = tl.arange(0, term.PADDED)
    rank = rank[None, :] if len(output.shape) == 1 else rank[None, None, :]
    at = term.weight + slot.to(tl.int64) * term.weight_stride + tl.expand_dims(output, -1) * term.RANK + rank
    return tl.load(at, mask=(rank < term.RANK) & tl.expand_dims(inside, -1) & (slot >= 0), other=0.0)


@triton.jit
def term_values(term: Term, factor, slot, row, part):
    """float32 of a row of the step, by outputs of one part, whose `term_factor` is given: zeros without adapter."""
    rank, split = tl.arange(0, term.PADDED), tl.arange(0, triton.next_power_of_2(term.SPLITS))
    where = (split[:, None] * term.step_rows + row).to(tl.int64)
    pieces = tl.load(
        term.sums + where * (term.PARTS * term.RANK) + part * term.RANK + rank[None, :],
        mask=(split[:, None] < term.SPLITS) & (rank[None, :] < term.RANK) & (slot >= 0), other=0.0,
    )  # fmt: skip
    scale = tl.load(term.scales + slot.to(tl.int64) * term.scale_stride + part, mask=slot >= 0, other=0.0)
    shrunk = tl.sum(pieces, axis=0) * scale
    shrunk = shrunk[None, :] if len(factor.shape) == 2 else shrunk[None, None, :]
    return tl.sum(factor.to(tl.float32) * shrunk, axis=len(factor.shape) - 1)


@triton.jit
def shrink_few_rows(
    x, a, rows, slots, sums,
    x_stride, a_stride, inputs, step_rows,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BESIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[split, row of the step, column] = x a^T over one piece of the inputs, of the rows of one block. BESIDE: all
    but the kernel ahead is complete when this starts, and that has nothing of what is written here."""
    launch_dependents()
    if not BESIDE:
        wait_for_prerequisites()
    block, split, columns = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + block)
    if slot >= 0:
        row = tl.load(rows + block * ROWS + tl.arange(0, ROWS))
        column = columns * PADDED + tl.arange(0, PADDED)
        place = split * SPLIT + tl.arange(0, SPLIT)
        factor = tl.load(
            a + slot.to(tl.int64) * a_stride + column[None, :] * inputs + place[:, None],
            mask=(column[None, :] < COLUMNS) & (place[:, None] < inputs), other=0.0,
        )  # fmt: skip
        mine = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + place[None, :],
            mask=(row[:, None] >= 0) & (place[None, :] < inputs), other=0.0,
        )  # fmt: skip
        total = tl.dot(mine, factor, input_precision=PRECISION)
        where = split.to(tl.int64) * step_rows + row
        inside = (row[:, None] >= 0) & (column[None, :] < COLUMNS)
        tl.store(sums + where[:, None] * COLUMNS + column[None, :], total, mask=inside)
    if BESIDE:
        wait_for_prerequisites()


@triton.jit
def expand_few_rows(term: Term, y, y_stride, ends: PartEnds, OUTPUTS: tl.constexpr):
    """y [rows of the step, outputs] += the term, of one row and outputs of one part."""
    launch_dependents()
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(term.row_slots + row)
    second_at = (ends.first + OUTPUTS - 1) // OUTPUTS  # tiles of the parts before
    third_at = second_at + (ends.second - ends.first + OUTPUTS - 1) // OUTPUTS
    second, third = (tile >= second_at) & (term.PARTS > 1), (tile >= third_at) & (term.PARTS > 2)
    part = second.to(tl.int32) + third.to(tl.int32)
    begin = tl.where(third, ends.second, tl.where(second, ends.first, 0))
    end = tl.where(third, ends.third, tl.where(second, ends.second, ends.first))
    tile -= tl.where(third, third_at, tl.where(second, second_at, 0))
    output = begin + tile * OUTPUTS + tl.arange(0, OUTPUTS)
    factor = term_factor(term, slot, output, output < end)
    wait_for_prerequisites()
    if slot < 0:
        return
    place = y + row.to(tl.int64) * y_stride + output
    added = term_values(term, factor, slot, row, part) + tl.load(place, mask=output < end, other=0.0).to(tl.float32)
    tl.store(place, added.to(y.dtype.element_ty), mask=output < end)


def few_rows(x: Tensor, factors: SlotFactors) -> FewRows:
    """Of x [T, inputs]."""
    rows, inputs = x.shape
    shape = (triton.cdiv(inputs, few_split_inputs(inputs)), rows, len(factors.parts) * factors.rank)
    return FewRows(x, torch.empty(shape, dtype=torch.float32, device=x.device))


def shrink_few(few: FewRows, factors: SlotFactors, blocks: AdapterBlocks, *, settled: bool) -> RowTerm:
    """`AdapterTerms.shrink_few`."""
    x, sums = few
    (rows, inputs), columns = x.shape, len(factors.parts) * factors.rank
    together = columns_together(columns)
    launch(
        shrink_few_rows, (len(blocks.slots), len(sums), triton.cdiv(columns, together)), x, factors.a,
        blocks.rows, blocks.slots, sums, x.stride(0), factors.a.stride(0), inputs, rows,
        COLUMNS=columns, PADDED=together, ROWS=BLOCK_ROWS, SPLIT=few_split_inputs(inputs), BESIDE=settled,
        PRECISION=precision(x), num_warps=4,
    )  # fmt: skip
    return RowTerm(sums, factors, blocks.row_slots)


def left_to_readers(factors: SlotFactors, *, normed: bool) -> bool:
    """Whether the kernel that reads a product adds its term; `normed`: one that norms whole rows of it."""
    fits = not normed or _LEAST_NORMED <= sum(factors.parts) <= _MOST_NORMED
    return fits and factors.rank <= _READERS_RANK


def expand_few(term: RowTerm, y: Tensor) -> None:
    """y [T, outputs] increased by it."""
    parts, padded = term.factors.parts, padded_rank(term.factors.rank)
    tile = min(_MOST_OUTPUTS, _FACTOR_ELEMENTS // padded, int(triton.next_power_of_2(max(parts))))
    launch(
        expand_few_rows, (len(y), sum(triton.cdiv(part, tile) for part in parts)), term_of(term), y, y.stride(0),
        PartEnds(*(sum(parts[: part + 1]) for part in range(3))), OUTPUTS=tile,
        num_warps=max(1, min(8, tile * padded // 2048)),
    )  # fmt: skip


def term_of(term: RowTerm | None) -> Term | None:
    """As kernels take it."""
    if term is None:
        return None
    sums, factors, row_slots = term
    splits, rows = sums.shape[:2]
    constants = (splits, len(factors.parts), factors.rank, padded_rank(factors.rank))
    return Term(
        sums,
        factors.b,
        factors.b.stride(0),
        factors.scales,
        factors.scales.stride(0),
        row_slots,
        rows,
        *map(constant, constants),
    )
