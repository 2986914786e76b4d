"""The additive term of adapters in Triton: two launches a matrix, A x and then B times that.

A program has one block of rows, all of one adapter, so an adapter's factors are read once however many of its requests
a step has. A x is summed in pieces of the inputs, by programs of their own: a single row's would else keep one program
busy for all inputs. Pieces follow from the matrix and are added in order, so a row's bits depend on no other row, nor
on a step's size. Products are of the compute dtype, with float32 sums; what is between the factors is scaled in float32
and rounded to the compute dtype once.

A x comes before the product that it is added to: on GPUs with dependent launches that product's weights are on their
way meanwhile. Nothing waits for the host, and launches follow from the number of blocks alone: captured steps have
padding.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, FEW_ROWS, split_inputs
from modelserve_worker.kernels.adapters.factor_tiles import columns_together, padded_rank, precision
from modelserve_worker.kernels.adapters.row_terms_triton import (
    expand_few,
    few_rows,
    left_to_readers,
    shrink_few,
)
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, FewRows, RowTerm, SlotFactors
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites

_INPUTS = 128  # of one product
_MOST_PARTS = 3
_MOST_OUTPUTS, _FACTOR_ELEMENTS = 256, 8192  # of one program, which holds B of its outputs: half as much of three parts


@triton.jit
def shrink_rows(
    x, a, rows, slots, sums,
    x_stride, a_stride, inputs, padded_rows,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[split, row of the blocks, column] = x a^T over one piece of the inputs."""
    launch_dependents()
    block, split, columns = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_prerequisites()
    slot = tl.load(slots + block)
    if slot < 0:
        return
    row = tl.load(rows + block * ROWS + tl.arange(0, ROWS))
    column = columns * PADDED + tl.arange(0, PADDED)
    total = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    for first in range(0, SPLIT, INPUTS):
        place = split * SPLIT + first + tl.arange(0, INPUTS)
        mine = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + place[None, :],
            mask=(row[:, None] >= 0) & (place[None, :] < inputs), other=0.0,
        )  # fmt: skip
        factor = tl.load(
            a + slot.to(tl.int64) * a_stride + column[None, :] * inputs + place[:, None],
            mask=(column[None, :] < COLUMNS) & (place[:, None] < inputs), other=0.0,
        )  # fmt: skip
        total = tl.dot(mine, factor, total, input_precision=PRECISION)
    where = split.to(tl.int64) * padded_rows + block * ROWS + tl.arange(0, ROWS)
    tl.store(sums + where[:, None] * COLUMNS + column[None, :], total, mask=column[None, :] < COLUMNS)


@triton.jit
def expand_rows(
    sums, weight, scales, firsts, slots, y,
    y_stride, weight_stride, scale_stride, outputs, padded_rows, first_end, second_end,
    SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[rows of the block, outputs of the program] += scale * (sum of sums over the pieces) weight^T, part by part;
    `weight` is B, and the rows of the blocks are `firsts`."""
    launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + block)
    row = tl.load(firsts + block * ROWS + tl.arange(0, ROWS))
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, PADDED)
    part_of = (output >= first_end).to(tl.int32) + (output >= second_end).to(tl.int32)
    of_block = block * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, MOST_SPLITS)
    held = tl.load(
        weight + slot.to(tl.int64) * weight_stride + output[None, :] * RANK + rank[:, None],
        mask=(rank[:, None] < RANK) & (output[None, :] < outputs) & (slot >= 0), other=0.0,
    )  # fmt: skip
    wait_for_prerequisites()
    if slot < 0:
        return
    place = y + row[:, None].to(tl.int64) * y_stride + output[None, :]
    mask = (row[:, None] >= 0) & (output[None, :] < outputs)
    before = tl.load(place, mask=mask, other=0.0)
    added = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        begin = 0 if part == 0 else (first_end if part == 1 else second_end)
        end = outputs if part == PARTS - 1 else (first_end if part == 0 else second_end)
        if (tile * OUTPUTS < end) & ((tile + 1) * OUTPUTS > begin):
            where = (split[:, None, None] * padded_rows + of_block[None, :, None]).to(tl.int64)
            pieces = tl.load(
                sums + where * (PARTS * RANK) + part * RANK + rank[None, None, :],
                mask=(split[:, None, None] < SPLITS) & (rank[None, None, :] < RANK), other=0.0,
            )  # fmt: skip
            shrunk = tl.sum(pieces, axis=0) * tl.load(scales + slot.to(tl.int64) * scale_stride + part)
            factor = tl.where(part_of[None, :] == part, held, 0.0) if PARTS > 1 else held
            added = tl.dot(
                shrunk.to(weight.dtype.element_ty), factor.to(weight.dtype.element_ty), added, input_precision=PRECISION
            )
    tl.store(place, (before.to(tl.float32) + added).to(y.dtype.element_ty), mask=mask)


class TritonTerms:
    """Of matrices with at most three parts. `exact`: a row's bits do not depend on a step's size either."""

    def __init__(self, *, exact: bool = False) -> None:
        self._few_rows = 0 if exact else FEW_ROWS

    def few(self, x: Tensor, factors: SlotFactors) -> FewRows | None:
        return few_rows(x, factors) if len(x) <= self._few_rows else None

    def shrink_few(self, few: FewRows, factors: SlotFactors, blocks: AdapterBlocks, *, settled: bool) -> RowTerm:
        return shrink_few(few, factors, blocks, settled=settled)

    def left_to_readers(self, factors: SlotFactors, *, normed: bool) -> bool:
        return left_to_readers(factors, normed=normed)

    def expand_few(self, term: RowTerm, y: Tensor) -> None:
        expand_few(term, y)

    def shrink(self, x: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> Tensor:
        inputs, columns = x.shape[1], len(factors.parts) * factors.rank
        split, padded = split_inputs(inputs), len(blocks.rows)
        sums = torch.empty((triton.cdiv(inputs, split), padded, columns), dtype=torch.float32, device=x.device)
        padded_columns = columns_together(columns)
        launch(
            shrink_rows, (len(blocks.slots), len(sums), triton.cdiv(columns, padded_columns)), x, factors.a,
            blocks.rows, blocks.slots, sums,
            x.stride(0), factors.a.stride(0), inputs, padded,
            COLUMNS=columns, PADDED=padded_columns, ROWS=BLOCK_ROWS,
            SPLIT=split, INPUTS=_INPUTS, PRECISION=precision(x), num_warps=2,
        )  # fmt: skip
        return sums

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        outputs, rank, parts = y.shape[1], factors.rank, len(factors.parts)
        first = factors.parts[0] if parts > 1 else outputs
        second = first + factors.parts[1] if parts > 2 else outputs
        padded, tile = outputs_together(rank)
        tile //= 1 if parts < _MOST_PARTS else 2
        launch(
            expand_rows, (len(blocks.slots), triton.cdiv(outputs, tile)), sums, factors.b, factors.scales,
            blocks.rows, blocks.slots, y, y.stride(0), factors.b.stride(0), factors.scales.stride(0), outputs,
            sums.shape[1], first, second,
            SPLITS=len(sums), MOST_SPLITS=triton.next_power_of_2(len(sums)), PARTS=parts, RANK=rank,
            PADDED=padded, ROWS=BLOCK_ROWS, OUTPUTS=tile,
            PRECISION=precision(factors.b), num_warps=8,
        )  # fmt: skip


def outputs_together(rank: int) -> tuple[int, int]:
    """Of B, the rank that one program has, padded, and outputs."""
    padded = padded_rank(rank)
    return padded, min(_MOST_OUTPUTS, _FACTOR_ELEMENTS // padded)
