"""The additive term of adapters of experts in Triton: a launch that groups rows, then two a matrix.

Rows of one adapter and one expert are put together on the device: their number is known nowhere else, and a step can be
captured. One program counts them, gives each pair of adapter and expert its blocks, and puts its rows there. In which
order these come is left open: a row's bits depend on no other row of its block.

Programs of A x and of B are those of `terms_triton`, but that rows lie where they were dealt to, and that a program of
B has outputs of one part: parts of experts' matrices are of one size.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, expert_blocks, split_inputs
from modelserve_worker.kernels.adapters.expert_terms import ExpertBlocks
from modelserve_worker.kernels.adapters.factor_tiles import columns_together, precision
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, SlotFactors
from modelserve_worker.kernels.adapters.terms_triton import outputs_together
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites

INPUTS = 128  # of one product
_GROUP = {"BLOCK": 1024, "num_warps": 8}


@triton.jit(do_not_specialize=["candidates", "pairs", "padded"])
def group_rows(
    step_rows,  # int32 [N] rows of the step that have adapters, in blocks of ROWS; -1: padding
    step_slots,  # int32 [N / ROWS]
    experts,  # int32 [T, K], what each row of the step chose
    places,  # int32 [T, K], where each choice was dealt to
    firsts,  # int32 [pairs], zeros: how many rows a pair of slot and expert has, then where the next one comes
    rows,  # int32 [padded]
    slots,  # int32 [padded / ROWS]
    of_experts,  # int32 [padded / ROWS]
    candidates,  # N * K
    pairs,  # slots * EXPERTS
    padded,
    EXPERTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `ExpertTerms.blocks`."""
    launch_dependents()
    wait_for_prerequisites()
    offset = tl.arange(0, BLOCK)
    for first in range(0, padded, BLOCK):
        tl.store(rows + first + offset, -1, mask=first + offset < padded)
    for first in range(0, padded // ROWS, BLOCK):
        tl.store(slots + first + offset, -1, mask=first + offset < padded // ROWS)
    tl.debug_barrier()
    for first in range(0, candidates, BLOCK):
        place = first + offset
        row = tl.load(step_rows + place // K, mask=place < candidates, other=-1)
        slot = tl.load(step_slots + place // K // ROWS, mask=row >= 0, other=0)
        expert = tl.load(experts + row * K + place % K, mask=row >= 0, other=EXPERTS)
        tl.atomic_add(firsts + slot * EXPERTS + expert, 1, mask=expert < EXPERTS)
    tl.debug_barrier()
    begin = tl.zeros([], tl.int32)
    for first in range(0, pairs, BLOCK):
        # Past the first cache, which knows nothing of what was added.
        count = tl.load(firsts + first + offset, mask=first + offset < pairs, other=0, cache_modifier=".cg")
        blocks = (count + ROWS - 1) // ROWS
        tl.store(firsts + first + offset, (begin + tl.cumsum(blocks, 0) - blocks) * ROWS, mask=first + offset < pairs)
        begin += tl.sum(blocks)
    tl.debug_barrier()
    for first in range(0, candidates, BLOCK):
        place = first + offset
        row = tl.load(step_rows + place // K, mask=place < candidates, other=-1)
        slot = tl.load(step_slots + place // K // ROWS, mask=row >= 0, other=0)
        expert = tl.load(experts + row * K + place % K, mask=row >= 0, other=EXPERTS)
        taken = expert < EXPERTS
        to = tl.atomic_add(firsts + slot * EXPERTS + expert, 1, mask=taken)
        dealt = tl.load(places + row * K + place % K, mask=taken, other=0)
        tl.store(rows + to, dealt, mask=taken)
        opens = taken & (to % ROWS == 0)
        tl.store(slots + to // ROWS, slot, mask=opens)
        tl.store(of_experts + to // ROWS, expert, mask=opens)


@triton.jit(do_not_specialize=["dealt_rows"])
def shrink_expert_rows(
    x, a, rows, slots, experts, sums,
    x_stride, a_stride, inputs, dealt_rows,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[split, dealt row, column] = x a^T over one piece of the inputs."""
    launch_dependents()
    block, split, columns = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_prerequisites()
    slot = tl.load(slots + block)
    if slot < 0:
        return
    expert = tl.load(experts + block)
    row = tl.load(rows + block * ROWS + tl.arange(0, ROWS))
    column = columns * PADDED + tl.arange(0, PADDED)
    mine = a + slot.to(tl.int64) * a_stride + expert.to(tl.int64) * (COLUMNS * inputs)
    total = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    for first in range(0, SPLIT, INPUTS):
        place = split * SPLIT + first + tl.arange(0, INPUTS)
        values = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + place[None, :],
            mask=(row[:, None] >= 0) & (place[None, :] < inputs), other=0.0,
        )  # fmt: skip
        factor = tl.load(
            mine + column[None, :] * inputs + place[:, None],
            mask=(column[None, :] < COLUMNS) & (place[:, None] < inputs), other=0.0,
        )  # fmt: skip
        total = tl.dot(values, factor, total, input_precision=PRECISION)
    where = split.to(tl.int64) * dealt_rows + row
    tl.store(
        sums + where[:, None] * COLUMNS + column[None, :], total,
        mask=(row[:, None] >= 0) & (column[None, :] < COLUMNS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["dealt_rows"])
def expand_expert_rows(
    sums, weight, scales, rows, slots, experts, y,
    y_stride, weight_stride, scale_stride, scales_each, outputs, dealt_rows, tiles,
    SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[rows of the block, outputs of the program] += scale * (sum of sums over the pieces) weight^T; `weight` is B,
    whose parts have `outputs` rows each, in `tiles` programs."""
    launch_dependents()
    block, part, tile = tl.program_id(0), tl.program_id(1) // tiles, tl.program_id(1) % tiles
    wait_for_prerequisites()
    slot = tl.load(slots + block)
    if slot < 0:
        return
    expert = tl.load(experts + block).to(tl.int64)
    row = tl.load(rows + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, PADDED)
    split = tl.arange(0, MOST_SPLITS)
    mine = weight + slot.to(tl.int64) * weight_stride + (expert * PARTS + part) * (outputs * RANK)
    factor = tl.load(
        mine + output[None, :] * RANK + rank[:, None],
        mask=(rank[:, None] < RANK) & (output[None, :] < outputs), other=0.0,
    )  # fmt: skip
    where = split[:, None, None].to(tl.int64) * dealt_rows + row[None, :, None]
    pieces = tl.load(
        sums + where * (PARTS * RANK) + part * RANK + rank[None, None, :],
        mask=(split[:, None, None] < SPLITS) & (rank[None, None, :] < RANK) & (row[None, :, None] >= 0), other=0.0,
    )  # fmt: skip
    scale = tl.load(scales + slot.to(tl.int64) * scale_stride + expert * scales_each + part)
    shrunk = (tl.sum(pieces, axis=0) * scale).to(weight.dtype.element_ty)
    place = y + row[:, None] * y_stride + part * outputs + output[None, :]
    mask = (row[:, None] >= 0) & (output[None, :] < outputs)
    before = tl.load(place, mask=mask, other=0.0)
    added = tl.dot(shrunk, factor, input_precision=PRECISION)
    tl.store(place, (before.to(tl.float32) + added).to(y.dtype.element_ty), mask=mask)


class TritonExpertTerms:
    """Of matrices whose parts are of one size."""

    def blocks(self, rows: AdapterBlocks, chosen: Tensor, places: Tensor, factors: SlotFactors) -> ExpertBlocks:
        (slots, experts), (step_rows, top_k) = factors.a.shape[:2], chosen.shape
        most = expert_blocks(step_rows * top_k, min(slots, step_rows), experts)
        dealt, of_slots, of_experts = (
            torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (most * BLOCK_ROWS, most, most)
        )
        # PyTorch's kernel ends all that came before it. Products behind it may read early where experts' rows end.
        firsts = torch.zeros(slots * experts, dtype=torch.int32, device=chosen.device)
        launch(
            group_rows, (1,), rows.rows, rows.slots, chosen, places, firsts, dealt, of_slots, of_experts,
            len(rows.rows) * top_k, slots * experts, most * BLOCK_ROWS,
            EXPERTS=experts, K=top_k, ROWS=BLOCK_ROWS, **_GROUP,
        )  # fmt: skip
        return ExpertBlocks(dealt, of_slots, of_experts)

    def shrink(self, x: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> Tensor:
        (dealt, inputs), columns = x.shape, factors.a.shape[2]
        split = split_inputs(inputs)
        sums = torch.empty((triton.cdiv(inputs, split), dealt, columns), dtype=torch.float32, device=x.device)
        padded_columns = columns_together(columns)
        launch(
            shrink_expert_rows, (len(blocks.slots), len(sums), triton.cdiv(columns, padded_columns)), x, factors.a,
            blocks.rows, blocks.slots, blocks.experts, sums, x.stride(0), factors.a.stride(0), inputs, dealt,
            COLUMNS=columns, PADDED=padded_columns, ROWS=BLOCK_ROWS,
            SPLIT=split, INPUTS=INPUTS, PRECISION=precision(x), num_warps=2,
        )  # fmt: skip
        return sums

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> None:
        outputs, rank, parts = factors.parts[0], factors.rank, len(factors.parts)
        padded, tile = outputs_together(rank)
        tiles = triton.cdiv(outputs, tile)
        launch(
            expand_expert_rows, (len(blocks.slots), parts * tiles), sums, factors.b, factors.scales,
            blocks.rows, blocks.slots, blocks.experts, y,
            y.stride(0), factors.b.stride(0), factors.scales.stride(0), factors.scales.stride(1), outputs,
            len(y), tiles,
            SPLITS=len(sums), MOST_SPLITS=triton.next_power_of_2(len(sums)), PARTS=parts, RANK=rank,
            PADDED=padded, ROWS=BLOCK_ROWS, OUTPUTS=tile, PRECISION=precision(factors.b), num_warps=8,
        )  # fmt: skip
