"""Triton kernels of `prompt_lookup.LookupBackend`: three short launches, the second of which reads histories."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import (
    dependent_launch,
    launch_dependents,
    wait_for_prerequisites,
)
from modelserve_worker.kernels.sampling.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH

_BLOCK = 2048  # places of one program
_COLUMNS = 32  # most tokens of a segment, and of a proposal: a power of two


@triton.jit(do_not_specialize_on_alignment=["slots", "firsts"])
def remember_tokens(history, slots, sampled, firsts, counts, positions, length, COLUMNS: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    segment, column = tl.program_id(0), tl.arange(0, COLUMNS)
    count = tl.load(counts + segment)
    tokens = tl.load(sampled + tl.load(firsts + segment) + column, mask=column < count, other=0)
    begin = tl.load(slots + segment).to(tl.int64) * length + tl.load(positions + segment) - count + 1
    tl.store(history + begin + column, tl.maximum(tokens, 0).to(tl.int32), mask=column < count)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def longest_match(
    history,
    slots,
    positions,
    prompts,
    predicted,
    best,  # int64 [S], below 0
    length,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    segment, first = tl.program_id(0), tl.program_id(1) * BLOCK
    slot, last = tl.load(slots + segment), tl.load(positions + segment)
    begins = length - tl.load(predicted + slot)
    if (first < last) | (first + BLOCK > begins):
        said = last - tl.load(prompts + slot) + 1
        text = history + slot.to(tl.int64) * length
        places = first + tl.arange(0, BLOCK)
        in_prediction = (places >= begins) & (places > last)
        matching = (places < last) | (in_prediction & (places < length - 1))
        matched = tl.zeros([BLOCK], dtype=tl.int32)
        for ago in tl.static_range(LONGEST):
            wanted = tl.load(text + tl.maximum(last - ago, 0))
            before = places - ago
            inside = (before >= 0) & (before < length)
            same = (tl.load(text + before, mask=inside, other=-1) == wanted) & inside & (last >= ago)
            of_prediction = ((before >= begins) & same & (before > last)) | ((before < begins) & (said <= ago))
            matching = matching & ((in_prediction & of_prediction) | (~in_prediction & same))
            matched += matching.to(tl.int32)
        beside = places - (begins + said - 1)
        nearness = 2 * length - 1 - tl.where(beside < 0, -2 * beside - 1, 2 * beside)
        keys = (2 * matched + in_prediction.to(tl.int32)).to(tl.int64) * (2 * length)
        keys += tl.where(in_prediction, nearness, places)
        found = tl.max(tl.where(matched >= SHORTEST, keys, -1), axis=0)
        if found >= 0:
            tl.atomic_max(best + segment, found, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["slots"])
def following_tokens(
    history, slots, positions, prompts, predicted, best, tokens, counts, length, num_tokens, COLUMNS: tl.constexpr
):
    launch_dependents()
    wait_for_prerequisites()
    segment, ahead = tl.program_id(0), tl.arange(0, COLUMNS)
    slot, last, key = tl.load(slots + segment), tl.load(positions + segment), tl.load(best + segment)
    rank = (tl.maximum(key, 0) % (2 * length)).to(tl.int32)
    beside = 2 * length - 1 - rank
    beside = tl.where(beside % 2 == 0, beside // 2, -(beside + 1) // 2)
    as_long = length - tl.load(predicted + slot) + last - tl.load(prompts + slot)
    place = tl.where((tl.maximum(key, 0) // (2 * length)) % 2 == 1, as_long + beside, rank)
    at = place + 1 + tl.where(place < last, ahead % tl.maximum(last - place, 1), ahead)
    there = (key >= 0) & (at < length) & (ahead < num_tokens)
    found = tl.load(history + slot.to(tl.int64) * length + at, mask=there, other=0)
    tl.store(tokens + segment * num_tokens + ahead, found, mask=ahead < num_tokens)
    tl.store(counts + segment, tl.sum(there.to(tl.int32), axis=0))


class TritonLookup:
    """Prompt lookup on CUDA."""

    def remember(
        self, history: Tensor, slots: Tensor, sampled: Tensor, firsts: Tensor, counts: Tensor, positions: Tensor
    ) -> None:
        remember_tokens[(len(slots),)](
            history, slots, sampled, firsts, counts, positions, history.shape[1], COLUMNS=_COLUMNS, num_warps=1,
            **dependent_launch(),
        )  # fmt: skip

    def look_up(
        self, history: Tensor, slots: Tensor, positions: Tensor, prompts: Tensor, predicted: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        segments, length = len(slots), history.shape[1]
        best = torch.full((segments,), -1, dtype=torch.int64, device=history.device)
        tokens = torch.empty(segments, num_tokens, dtype=torch.int32, device=history.device)
        counts = torch.empty(segments, dtype=torch.int32, device=history.device)
        longest_match[(segments, triton.cdiv(length, _BLOCK))](
            history, slots, positions, prompts, predicted, best, length, BLOCK=_BLOCK, LONGEST=LONGEST_MATCH,
            SHORTEST=SHORTEST_MATCH, num_warps=4, **dependent_launch(),
        )  # fmt: skip
        following_tokens[(segments,)](
            history, slots, positions, prompts, predicted, best, tokens, counts, length, num_tokens, COLUMNS=_COLUMNS,
            num_warps=1, **dependent_launch(),
        )  # fmt: skip
        return tokens, counts
