"""Triton kernels that bring rows into the order of the experts they chose; `experts` has the interface."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.experts.experts import Choice, DealtRows
from modelserve_worker.kernels.experts.routing_triton import NOBODY

_DEAL = {"BLOCK": 4096, "num_warps": 8}


@triton.jit(do_not_specialize=["slots"])
def deal_slots(
    experts,  # int32 [slots]
    places,  # int32 [slots]
    ends,  # int32 [EXPERTS]
    slots,
    BLOCK: tl.constexpr,
):
    """One program for each expert: it counts the slots of those before it, then numbers its own in their order."""
    launch_dependents()
    wait_for_prerequisites()
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, slots, BLOCK):
        slot = first + offset
        chosen = tl.load(experts + slot, mask=slot < slots, other=NOBODY)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before)
    for first in range(0, slots, BLOCK):
        slot = first + offset
        mine = tl.load(experts + slot, mask=slot < slots, other=NOBODY) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(places + slot, place + rank - 1, mask=mine)
        place += tl.sum(mine.to(tl.int32))
    tl.store(ends + expert, place)


@triton.jit
def copy_rows(x, experts, places, dealt, WIDTH: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    for choice in tl.static_range(K):
        if tl.load(experts + row * K + choice) != NOBODY:
            place = tl.load(places + row * K + choice).to(tl.int64)
            tl.store(dealt + place * WIDTH + column, values, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def deal_rows(
    x,  # [rows, WIDTH]
    experts,  # int32 [rows, K]
    places,  # int32 [rows, K]
    ends,  # int32 [EXPERTS]
    dealt,  # [rows K, WIDTH]
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two from rows K on
):
    """A program for each row and each expert looks at all choices, copies its row, and says where its expert ends."""
    launch_dependents()
    wait_for_prerequisites()
    member = tl.program_id(0)
    offset = tl.arange(0, SLOTS)
    chosen = tl.load(experts + offset, mask=offset < rows * K, other=NOBODY)
    if member < EXPERTS:
        tl.store(ends + member, tl.sum((chosen <= member).to(tl.int32), axis=0))
    if member < rows:
        column, choice = tl.arange(0, BLOCK), tl.arange(0, triton.next_power_of_2(K))
        inside = column < WIDTH
        values = tl.load(x + member * WIDTH + column, mask=inside, other=0.0)
        slots = member * K + choice
        own = tl.load(experts + slots, mask=choice < K, other=NOBODY)
        before = (chosen[None, :] < own[:, None]) | (
            (chosen[None, :] == own[:, None]) & (offset[None, :] < slots[:, None])
        )
        place = tl.sum(before.to(tl.int32), axis=1)
        tl.store(places + slots, place, mask=own != NOBODY)
        for each in tl.static_range(K):
            mine = choice == each
            if tl.sum(tl.where(mine, own, 0), axis=0) != NOBODY:
                to = tl.sum(tl.where(mine, place, 0), axis=0)
                tl.store(dealt + to.to(tl.int64) * WIDTH + column, values, mask=inside)


def deal_together(x: Tensor, choice: Choice, experts: int) -> DealtRows:
    """`ExpertBackend.deal` in one launch, of so few rows that each of its programs may look at all choices."""
    (rows, width), top_k = x.shape, choice.experts.shape[1]
    places = torch.empty_like(choice.experts)
    ends = torch.empty(experts, dtype=torch.int32, device=x.device)
    dealt = torch.empty((rows * top_k, width), dtype=x.dtype, device=x.device)
    slots = max(16, triton.next_power_of_2(rows * top_k))
    launch(
        deal_rows, (max(rows, experts),), x, choice.experts, places, ends, dealt, rows, EXPERTS=experts, SLOTS=slots,
        **(_copy_launch(width, top_k) | {"num_warps": 8}),
    )  # fmt: skip
    return DealtRows(dealt, ends, places)


def deal(x: Tensor, choice: Choice, experts: int) -> DealtRows:
    """`ExpertBackend.deal`, in two launches."""
    (rows, width), top_k = x.shape, choice.experts.shape[1]
    places = torch.empty_like(choice.experts)
    ends = torch.empty(experts, dtype=torch.int32, device=x.device)
    dealt = torch.empty((rows * top_k, width), dtype=x.dtype, device=x.device)
    launch(deal_slots, (experts,), choice.experts, places, ends, rows * top_k, **_DEAL)
    launch(copy_rows, (rows,), x, choice.experts, places, dealt, **_copy_launch(width, top_k))
    return DealtRows(dealt, ends, places)


def _copy_launch(width: int, top_k: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "K": top_k, "num_warps": max(1, min(8, block // 512))}
