"""Triton kernels of `step_start.StepDoors`: one launch each, where PyTorch would need four to eight."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.dependent_launch import dependent_launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.specimen import KernelSpecimen
from modelserve_worker.kernels.step import Draws

Rotation = tuple[Tensor, Tensor]  # cos and sin

_BLOCK = 128  # rows of one program


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
    slots,
    firsts,
    lengths,
    rows,
    slot_tokens,
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
    """The doors on a CUDA device."""

    def tokens(self, ids: Tensor, slots: Tensor, slot_tokens: Tensor) -> Tensor:
        rows = ids.shape[0]
        step_tokens[(triton.cdiv(rows, _BLOCK),)](
            ids, slots, slot_tokens, rows, COLUMNS=slot_tokens.shape[1], BLOCK=_BLOCK, num_warps=1,
            **dependent_launch(),
        )  # fmt: skip
        return ids

    def rotations(self, positions: Tensor, first: Tensor, second: Tensor) -> tuple[Rotation, Rotation]:
        rows, pairs = positions.shape[0], (first.shape[0], second.shape[0])
        cos_1, sin_1, cos_2, sin_2 = (
            torch.empty((rows, count), dtype=torch.float32, device=positions.device) for count in pairs for _ in "cs"
        )
        rotations[(rows,)](
            positions, first, second, cos_1, sin_1, cos_2, sin_2, FIRST_PAIRS=pairs[0], SECOND_PAIRS=pairs[1],
            FIRST_BLOCK=triton.next_power_of_2(pairs[0]), SECOND_BLOCK=triton.next_power_of_2(pairs[1]), num_warps=4,
            **dependent_launch(),
        )  # fmt: skip
        return (cos_1, sin_1), (cos_2, sin_2)

    def accept(self, sampled: Tensor, fed: Tensor, draws: Draws, slot_tokens: Tensor) -> Tensor:
        segments, counts = draws.slots.shape[0], torch.empty_like(draws.slots)
        accept_tokens[(triton.cdiv(segments, _BLOCK),)](
            sampled, fed, *draws, slot_tokens, counts, segments, COLUMNS=slot_tokens.shape[1], BLOCK=_BLOCK,
            num_warps=1, **dependent_launch(),
        )  # fmt: skip
        return counts


_INTS = dict.fromkeys(("ids", "slots", "slot_tokens"), "*i32")
_DRAWN = dict.fromkeys(("fed", "slots", "firsts", "lengths", "rows", "slot_tokens", "counts"), "*i32")
SPECIMENS = (
    *(
        KernelSpecimen(kernel, arguments, {"COLUMNS": columns, "BLOCK": _BLOCK}, num_warps=1)
        for columns in (1, 5)
        for kernel, arguments in (
            (step_tokens, {**_INTS, "rows": "i32"}),
            (accept_tokens, {"sampled": "*i64", **_DRAWN, "segments": "i32"}),
        )
    ),
    KernelSpecimen(
        rotations,
        {"positions": "*i32"}
        | dict.fromkeys(("first", "second", "first_cos", "first_sin", "second_cos", "second_sin"), "*fp32"),
        {"FIRST_PAIRS": 128, "SECOND_PAIRS": 256, "FIRST_BLOCK": 128, "SECOND_BLOCK": 256},
        num_warps=4,
    ),
)
