"""Triton kernels of `step_start.StepBackend`: one launch each, where PyTorch would need four to eight."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.step import Draws

Rotation = tuple[Tensor, Tensor]  # cos and sin

_BLOCK = 128  # rows of one program
_PLACED = 4  # arrays that one launch settles at most


# Slots are parts of a step's buffer, and the rows are the batch's.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids", "slots"])
def step_tokens(ids, slots, slot_tokens, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    given = tl.load(ids + row, mask=inside, other=0)
    slot = tl.maximum(tl.load(slots + row, mask=inside, other=0), 0)
    known = tl.load(slot_tokens + slot * COLUMNS - 1 - given, mask=inside & (given < 0), other=0)
    tl.store(ids + row, known, mask=inside & (given < 0))


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["slots", "firsts", "lengths", "rows"])
def accept_tokens(
    sampled,
    fed,
    positions,
    slots,
    firsts,
    lengths,
    rows,
    slot_tokens,
    slot_positions,
    counts,
    segments,
    COLUMNS: tl.constexpr,  # of slot_tokens: most tokens of a segment
    BLOCK: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    right = segment < segments
    inside = right
    slot = tl.load(slots + segment, mask=inside, other=0)
    first = tl.load(firsts + segment, mask=inside, other=0)
    length = tl.load(lengths + segment, mask=inside, other=0)
    row = tl.load(rows + segment, mask=inside, other=0)
    count = tl.full([BLOCK], 1, tl.int32)
    last = tl.load(sampled + first, mask=inside, other=0)
    for offset in tl.static_range(1, COLUMNS):
        right = right & (length > offset)
        given = tl.load(fed + row + offset, mask=right, other=0)
        right = right & (last == given)
        last = tl.where(right, tl.load(sampled + first + offset, mask=right, other=0), last)
        count += right.to(tl.int32)
    tl.store(slot_tokens + slot * COLUMNS, tl.maximum(last, 0).to(tl.int32), mask=inside)
    tl.store(counts + segment, count, mask=inside)
    if COLUMNS > 1:
        tl.store(slot_positions + slot, tl.load(positions + row + count - 1, mask=inside, other=0) + 1, mask=inside)


@triton.jit
def moved_to(values, slots, rows, row, assumed, slot_positions):
    """Add to each of `rows` values what its slot is ahead of where it was assumed."""
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    from_position = tl.load(assumed + slot, mask=slot >= 0, other=-1)
    wanted = from_position >= 0
    moved = tl.load(slot_positions + slot, mask=wanted, other=0) - from_position
    tl.store(values + row, tl.load(values + row, mask=wanted, other=0) + moved, mask=wanted)


@triton.jit(
    do_not_specialize=["rows_0", "rows_1", "rows_2", "rows_3"],
    do_not_specialize_on_alignment=[
        "values_0",
        "values_1",
        "values_2",
        "values_3",
        "slots_0",
        "slots_1",
        "slots_2",
        "slots_3",
    ],
)
def settle_positions(
    values_0,
    slots_0,
    rows_0,
    values_1,
    slots_1,
    rows_1,
    values_2,
    slots_2,
    rows_2,
    values_3,
    slots_3,
    rows_3,
    assumed,
    slot_positions,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row, which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    if which == 0:
        moved_to(values_0, slots_0, rows_0, row, assumed, slot_positions)
    elif which == 1:
        moved_to(values_1, slots_1, rows_1, row, assumed, slot_positions)
    elif which == 2:
        moved_to(values_2, slots_2, rows_2, row, assumed, slot_positions)
    else:
        moved_to(values_3, slots_3, rows_3, row, assumed, slot_positions)


@triton.jit
def store_rotation(position, frequencies, cos, sin, row, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.arange(0, BLOCK)
    wanted = pair < PAIRS
    angle = position * tl.load(frequencies + pair, mask=wanted, other=0.0)
    tl.store(cos + row * PAIRS + pair, tl.cos(angle), mask=wanted)
    tl.store(sin + row * PAIRS + pair, tl.sin(angle), mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotations(
    positions,
    first,
    second,
    first_cos,
    first_sin,
    second_cos,
    second_sin,
    FIRST_PAIRS: tl.constexpr,
    SECOND_PAIRS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.float32)
    store_rotation(position, first, first_cos, first_sin, row, FIRST_PAIRS, FIRST_BLOCK)
    store_rotation(position, second, second_cos, second_sin, row, SECOND_PAIRS, SECOND_BLOCK)


class TritonStep:
    """The operations on a CUDA device."""

    def tokens(self, ids: Tensor, slots: Tensor, slot_tokens: Tensor) -> Tensor:
        rows = ids.shape[0]
        launch(
            step_tokens, (triton.cdiv(rows, _BLOCK),),
            ids, slots, slot_tokens, rows, COLUMNS=slot_tokens.shape[1], BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
        return ids

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        rows, pairs = positions.shape[0], (first.shape[0], second.shape[0])
        cos_1, sin_1, cos_2, sin_2 = (
            torch.empty((rows, count), dtype=torch.float32, device=positions.device) for count in pairs for _ in "cs"
        )
        launch(
            rotations, (rows,),
            positions, first, second, cos_1, sin_1, cos_2, sin_2, FIRST_PAIRS=pairs[0], SECOND_PAIRS=pairs[1],
            FIRST_BLOCK=triton.next_power_of_2(pairs[0]), SECOND_BLOCK=triton.next_power_of_2(pairs[1]), num_warps=4,
        )  # fmt: skip
        return (cos_1, sin_1), (cos_2, sin_2)

    def settle(self, placed: Sequence[tuple[Tensor, Tensor]], assumed: Tensor, slot_positions: Tensor) -> None:
        most = max(values.shape[0] for values, _ in placed)
        pairs = [(values, slots, values.shape[0]) for values, slots in placed]
        pairs += [pairs[0]] * (_PLACED - len(pairs))  # of which no program asks
        launch(
            settle_positions, (triton.cdiv(most, _BLOCK), len(placed)),
            *(each for pair in pairs for each in pair), assumed, slot_positions, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip

    def accept(
        self, sampled: Tensor, fed: Tensor, positions: Tensor, draws: Draws, slot_tokens: Tensor, slot_positions: Tensor
    ) -> Tensor:
        segments, counts = draws.slots.shape[0], torch.empty_like(draws.slots)
        launch(
            accept_tokens, (triton.cdiv(segments, _BLOCK),),
            sampled, fed, positions, *draws, slot_tokens, slot_positions, counts, segments,
            COLUMNS=slot_tokens.shape[1], BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
        return counts
