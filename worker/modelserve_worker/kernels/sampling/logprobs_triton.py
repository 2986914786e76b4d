"""Log probabilities of rows of logits in kernels, which read them once, by programs that share out each row.

`_report_chunks` writes of a chunk its largest value, the sum of exponentials by that, how many values are above the
chosen token's, and its likeliest tokens; `_report_rows` puts the chunks of a row together, in their order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.sampling.adjusting_triton import Softcap, capped, softcap_of
from modelserve_worker.kernels.sampling.candidates_triton import ROW_WARPS, padded
from modelserve_worker.kernels.sampling.ordering_triton import (
    LEAST_KEY,
    NOBODY,
    candidate_of,
    exp,
    key_of,
    largest,
    log,
    token_of,
    value_of,
    write_largest,
)
from modelserve_worker.kernels.sampling.sampling import RowLogprobs

_CAPACITY = 32  # likeliest tokens, a power of two above what the API takes


class RawRows(NamedTuple):
    """Rows `places` int64 [N] of raw logits [M, vocab], and a token of each, int64 [N]."""

    logits: Tensor
    places: Tensor
    tokens: Tensor
    row_stride: int
    vocab: int


class ChunkSums(NamedTuple):
    """By chunk, [N, chunks]: the largest value and the sum of exponentials by it, float32; values above the chosen
    token's, int32; candidates int64 [N, chunks, most]."""

    largest: Tensor
    total: Tensor
    above: Tensor
    candidates: Tensor


def logprobs(
    logits: Tensor, tokens: Tensor, places: Tensor, *, most: int, softcap: float | None, chunk: int
) -> RowLogprobs:
    """See SamplingBackend."""
    assert most <= _CAPACITY, f"{most} alternatives of a token are more than {_CAPACITY}"
    count, vocab, device = len(places), logits.shape[1], logits.device
    chunks = triton.cdiv(vocab, chunk)
    highest, total = torch.empty(2, count, chunks, dtype=torch.float32, device=device)
    above = torch.empty(count, chunks, dtype=torch.int32, device=device)
    candidates = torch.empty(count, chunks, most, dtype=torch.int64, device=device)
    finalists = torch.empty(count, most, dtype=torch.int64, device=device)
    found = RowLogprobs(
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, most, dtype=torch.int64, device=device),
        torch.empty(count, most, dtype=torch.float32, device=device),
    )
    raw = RawRows(logits, places, tokens, logits.stride(0), vocab)
    sums, cap = ChunkSums(highest, total, above, candidates), softcap_of(softcap)
    launch(
        _report_chunks, (chunks, count),
        raw, sums, cap, most, CAPPED=softcap is not None, CHUNK=chunk, CAPACITY=_CAPACITY, num_warps=ROW_WARPS,
    )  # fmt: skip
    launch(
        _report_rows, (count,),
        raw, sums, cap, finalists, found.chosen, found.rank, found.top_tokens, found.top_logprobs, most, chunks,
        CAPPED=softcap is not None, PARTS=padded(chunks, _CAPACITY), CAPACITY=_CAPACITY, num_warps=ROW_WARPS,
    )  # fmt: skip
    return found


@triton.jit
def _value_at(of: RawRows, row, softcap: Softcap, CAPPED: tl.constexpr):
    """Of the chosen token."""
    token = tl.maximum(tl.load(of.tokens + row), 0)
    logit = tl.load(of.logits + tl.load(of.places + row) * of.row_stride + token).to(tl.float32)
    value, _ = capped(logit, softcap, CAPPED)
    return value


@triton.jit(do_not_specialize=["most"])
def _report_chunks(
    of: RawRows,
    to: ChunkSums,
    softcap: Softcap,
    most,
    CAPPED: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < of.vocab
    first = tl.load(of.places + row) * of.row_stride
    chosen = _value_at(of, row, softcap, CAPPED)
    logits = tl.load(of.logits + first + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    values, _ = capped(logits, softcap, CAPPED)
    values = tl.where(inside, values, -float("inf"))
    top = tl.max(values, axis=0)
    entry = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(to.largest + entry, top)
    tl.store(to.total + entry, tl.sum(tl.where(values > -float("inf"), exp(values - top), 0.0), axis=0))
    tl.store(to.above + entry, tl.sum((values > chosen).to(tl.int32), axis=0))
    if most > 0:
        keys = tl.where(inside, key_of(values), LEAST_KEY)
        groups = tl.reshape(keys, [CAPACITY, CHUNK // CAPACITY], can_reorder=True)
        picked, place = largest(keys, tl.min(tl.max(groups, axis=1), axis=0), most)
        tl.store(to.candidates + entry * most + place, candidate_of(keys, tokens), mask=picked)


@triton.jit(do_not_specialize=["most"])
def _report_rows(
    of: RawRows,
    sums: ChunkSums,
    softcap: Softcap,
    finalists,
    chosen,
    rank,
    top_tokens,
    top_logprobs,
    most,
    chunks,
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The likeliest tokens are written in their order."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    here = part < chunks
    tops = tl.load(sums.largest + row * chunks + part, mask=here, other=-float("inf"))
    top = tl.max(tops, axis=0)
    totals = tl.load(sums.total + row * chunks + part, mask=here, other=0.0)
    total = tl.sum(tl.where(tops > -float("inf"), totals * exp(tops - top), 0.0), axis=0)
    whole = log(total)
    tl.store(chosen + row, _value_at(of, row, softcap, CAPPED) - top - whole)
    above = tl.sum(tl.load(sums.above + row * chunks + part, mask=here, other=0), axis=0)
    tl.store(rank + row, (above + 1).to(tl.int64))
    if most > 0:
        mine = finalists + row * most
        write_largest(sums.candidates + row * chunks * most, mine, chunks, most, most, PARTS, CAPACITY)
        tl.debug_barrier()  # the threads that read the finalists are not those that wrote them
        lane = tl.arange(0, CAPACITY)
        final = tl.load(mine + lane, mask=lane < most, other=NOBODY)
        place = tl.sum((final[None, :] > final[:, None]).to(tl.int32), axis=1)
        named = row * most + place
        tl.store(top_tokens + named, token_of(final).to(tl.int64), mask=lane < most)
        tl.store(top_logprobs + named, value_of(final) - top - whole, mask=lane < most)
