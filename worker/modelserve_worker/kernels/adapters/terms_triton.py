"""The additive term of adapters in Triton: two launches a matrix, A x and then B times that.

A program has one block of rows, all of one adapter, so an adapter's factors are read once however many of its requests
a step has. A x is summed in pieces of INPUTS_PER_SPLIT inputs, by programs of their own: a single row's would else keep
one program busy for all inputs. Pieces are added in order, so a row's bits depend on no other row, and on no split that
a step's size would choose. Products are of the compute dtype, with float32 sums; what is between the factors is scaled
in float32 and rounded to the compute dtype once.

Nothing waits for the host, and launches follow from the number of blocks alone: captured steps have padding.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, INPUTS_PER_SPLIT
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, SlotFactors

_INPUTS = 64  # of one product
_OUTPUTS = 128  # of one program
_LEAST_COLUMNS = 16  # of a product


@triton.jit
def _shrink(
    x, a, rows, slots, sums,
    x_stride, a_stride, inputs, padded_rows,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[split, row of the blocks, column] = x a^T over one piece of the inputs."""
    block, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + block)
    if slot < 0:
        return
    row = tl.load(rows + block * ROWS + tl.arange(0, ROWS))
    column = tl.arange(0, PADDED)
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
def _expand(
    sums, b, scales, rows, slots, y,
    y_stride, b_stride, scale_stride, outputs, padded_rows, first_end, second_end,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[rows of the block, outputs of the program] += scale * (sum of sums over the pieces) b^T, part by part."""
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + block)
    if slot < 0:
        return
    row = tl.load(rows + block * ROWS + tl.arange(0, ROWS))
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, PADDED)
    part_of = (output >= first_end).to(tl.int32) + (output >= second_end).to(tl.int32)
    of_block = block * ROWS + tl.arange(0, ROWS)
    added = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        begin = 0 if part == 0 else (first_end if part == 1 else second_end)
        end = outputs if part == PARTS - 1 else (first_end if part == 0 else second_end)
        if (tile * OUTPUTS < end) & ((tile + 1) * OUTPUTS > begin):
            shrunk = tl.zeros((ROWS, PADDED), dtype=tl.float32)
            for split in range(SPLITS):
                where = split * padded_rows + of_block
                shrunk += tl.load(
                    sums + where[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK + rank[None, :],
                    mask=rank[None, :] < RANK, other=0.0,
                )  # fmt: skip
            shrunk *= tl.load(scales + slot.to(tl.int64) * scale_stride + part)
            factor = tl.load(
                b + slot.to(tl.int64) * b_stride + output[None, :] * RANK + rank[:, None],
                mask=(rank[:, None] < RANK) & (output[None, :] < outputs) & (part_of[None, :] == part), other=0.0,
            )  # fmt: skip
            added = tl.dot(shrunk.to(b.dtype.element_ty), factor, added, input_precision=PRECISION)
    place = y + row[:, None].to(tl.int64) * y_stride + output[None, :]
    mask = (row[:, None] >= 0) & (output[None, :] < outputs)
    tl.store(place, (tl.load(place, mask=mask, other=0.0).to(tl.float32) + added).to(y.dtype.element_ty), mask=mask)


class TritonTerms:
    """Of matrices with at most three parts."""

    def add(self, x: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        inputs, outputs, rank, parts = x.shape[1], y.shape[1], factors.rank, len(factors.parts)
        count, padded = len(blocks.slots), len(blocks.rows)
        splits, columns = triton.cdiv(inputs, INPUTS_PER_SPLIT), parts * rank
        sums = torch.empty((splits, padded, columns), dtype=torch.float32, device=x.device)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _shrink[(count, splits)](
            x, factors.a, blocks.rows, blocks.slots, sums,
            x.stride(0), factors.a.stride(0), inputs, padded,
            COLUMNS=columns, PADDED=max(_LEAST_COLUMNS, triton.next_power_of_2(columns)), ROWS=BLOCK_ROWS,
            SPLIT=INPUTS_PER_SPLIT, INPUTS=_INPUTS, PRECISION=precision,
        )  # fmt: skip
        first = factors.parts[0] if parts > 1 else outputs
        second = first + factors.parts[1] if parts > 2 else outputs
        _expand[(count, triton.cdiv(outputs, _OUTPUTS))](
            sums, factors.b, factors.scales, blocks.rows, blocks.slots, y,
            y.stride(0), factors.b.stride(0), factors.scales.stride(0), outputs, padded, first, second,
            SPLITS=splits, PARTS=parts, RANK=rank, PADDED=max(_LEAST_COLUMNS, triton.next_power_of_2(rank)),
            ROWS=BLOCK_ROWS, OUTPUTS=_OUTPUTS, PRECISION=precision,
        )  # fmt: skip
