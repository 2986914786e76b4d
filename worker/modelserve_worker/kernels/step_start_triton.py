"""Triton kernels of `step_start.StepDoors`: one launch each, where PyTorch would need four to eight."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.dependent_launch import dependent_launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.specimen import KernelSpecimen

Rotation = tuple[Tensor, Tensor]  # cos and sin

_BLOCK = 128  # rows of one program


# Slots are parts of a step's buffer, and the rows are the batch's.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids", "slots"])
def step_tokens(ids, slots, last_tokens, tokens, rows, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    given = tl.load(ids + row, mask=inside, other=0)
    slot = tl.maximum(tl.load(slots + row, mask=inside, other=0), 0)
    last = tl.load(last_tokens + slot, mask=inside & (given < 0), other=0)
    tl.store(tokens + row, tl.where(given < 0, last, given), mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots"])
def keep_tokens(sampled, slots, last_tokens, rows, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0)
    token = tl.maximum(tl.load(sampled + row, mask=inside, other=0), 0)
    tl.store(last_tokens + slot, token.to(tl.int32), mask=inside)


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

    def tokens(self, ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
        rows, tokens = ids.shape[0], torch.empty_like(ids)
        step_tokens[(triton.cdiv(rows, _BLOCK),)](
            ids, slots, last_tokens, tokens, rows, BLOCK=_BLOCK, num_warps=1, **dependent_launch()
        )
        return tokens

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

    def keep_tokens(self, sampled: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        rows = sampled.shape[0]
        keep_tokens[(triton.cdiv(rows, _BLOCK),)](
            sampled, slots, last_tokens, rows, BLOCK=_BLOCK, num_warps=1, **dependent_launch()
        )


_INTS = dict.fromkeys(("ids", "slots", "last_tokens", "tokens"), "*i32")
SPECIMENS = (
    KernelSpecimen(step_tokens, {**_INTS, "rows": "i32"}, {"BLOCK": _BLOCK}, num_warps=1),
    KernelSpecimen(
        keep_tokens, {"sampled": "*i64", "slots": "*i32", "last_tokens": "*i32", "rows": "i32"}, {"BLOCK": _BLOCK}, 1
    ),
    KernelSpecimen(
        rotations,
        {"positions": "*i32"}
        | dict.fromkeys(("first", "second", "first_cos", "first_sin", "second_cos", "second_sin"), "*fp32"),
        {"FIRST_PAIRS": 128, "SECOND_PAIRS": 256, "FIRST_BLOCK": 128, "SECOND_BLOCK": 256},
        num_warps=4,
    ),
)
