"""The draw of rows that no few candidates decide: top-p or min-p of the whole vocabulary, and large top-k.

Nothing is sorted. Of all tokens the one with the best value and noise is what an unfiltered row draws; where filters
keep it, it is what the filtered row draws, too. They keep it if too little stands above it: what all tokens above it
weigh is counted in one pass. If they do not, then nothing at or below it is kept either, and the best of what is above
it is asked next. Of the first 1 - top_p are refused, and each refusal leaves out, on average, half of what was left.

`_scale_chunks` writes adjusted values by the temperature, and of each chunk the best with and without noise;
`_weigh_chunks` what a chunk weighs, and what of it stands above the row's winner; `_draw_filtered_rows` decides, and
goes on alone where it has to. Weights are integers, so no order of their sum matters.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.sampling.adjusting_triton import (
    RowNumbers,
    SlotAdjustments,
    Softcap,
    TokenMasks,
    adjusted,
    capped,
    row_numbers,
    slot_adjustments,
    softcap_of,
    token_masks,
)
from modelserve_worker.kernels.sampling.candidates_triton import CHUNK_WARPS, ROW_WARPS
from modelserve_worker.kernels.sampling.ordering_triton import (
    LEAST_KEY,
    NAN_KEY,
    NOBODY,
    candidate_of,
    gumbel_noise,
    key_of,
    log,
    token_of,
    value_of,
    weights_of,
)
from modelserve_worker.kernels.sampling.sampling import SampledRows

_LEAST = tl.constexpr((-(1 << 31) + 1) << 32)  # no more than any candidate of a token


class DrawColumns(NamedTuple):
    """Parameters by slot, as of `SlotColumns`."""

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor


class ScaledRows(NamedTuple):
    """Of N rows of the whole vocabulary, in chunks: adjusted values by the temperature, float32 [N, vocab]; of each
    chunk the best candidate without noise and with it, int64 [N, chunks]."""

    scaled: Tensor
    likeliest: Tensor
    noisy: Tensor
    vocab: int
    chunks: int


class Masses(NamedTuple):
    """Of chunks, int64 [N, chunks]: what min-p keeps of each weighs, and what of that stands above the row's winner."""

    all: Tensor
    above: Tensor


def draw_filtered(logits: Tensor, rows: SampledRows, places: Tensor, *, chunk: int) -> Tensor:
    """See SamplingBackend."""
    count, vocab, columns, device = len(places), logits.shape[1], rows.columns, logits.device
    chunks = triton.cdiv(vocab, chunk)
    of_slots = DrawColumns(columns.seeds, columns.temperature, columns.top_k, columns.top_p, columns.min_p)
    likeliest, noisy, of_all, above = torch.empty(4, count, chunks, dtype=torch.int64, device=device)
    scaled = ScaledRows(torch.empty(count, vocab, dtype=torch.float32, device=device), likeliest, noisy, vocab, chunks)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    numbers, masses = row_numbers(rows), Masses(of_all, above)
    launch(
        _scale_chunks, (chunks, count),
        logits, places, numbers, of_slots, scaled, token_masks(rows), slot_adjustments(rows),
        softcap_of(rows.softcap), logits.stride(0), CAPPED=rows.softcap is not None, CHUNK=chunk,
        num_warps=CHUNK_WARPS,
    )  # fmt: skip
    padded = triton.next_power_of_2(chunks)
    launch(
        _weigh_chunks, (chunks, count),
        numbers, of_slots, scaled, masses, CHUNK=chunk, CHUNKS=padded, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    launch(
        _draw_filtered_rows, (count,),
        numbers, of_slots, scaled, masses, tokens, CHUNK=chunk, CHUNKS=padded, num_warps=ROW_WARPS,
    )  # fmt: skip
    return tokens


@triton.jit
def _scale_chunks(
    logits,
    places,
    rows: RowNumbers,
    columns: DrawColumns,
    to: ScaledRows,
    masks: TokenMasks,  # or None
    adjustments: SlotAdjustments,  # or None
    softcap: Softcap,
    row_stride,
    CAPPED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a chunk of `to`; NaNs as -inf, and as the best candidate."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows.slots + row)
    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < to.vocab
    place = tl.load(places + row).to(tl.int64)
    values = tl.load(logits + place * row_stride + tokens, mask=inside, other=0.0).to(tl.float32)
    values, broken = capped(values, softcap, CAPPED)
    values = adjusted(values, tokens, inside, row, slot, rows.output_counts, masks, adjustments, CHUNK)
    values = tl.div_rn(values, tl.load(columns.temperatures + slot))
    tl.store(to.scaled + row * to.vocab + tokens, values, mask=inside)
    keys = tl.where(inside, tl.where(broken, NAN_KEY, key_of(values)), LEAST_KEY)
    entry = row * to.chunks + tl.program_id(0)
    tl.store(to.likeliest + entry, tl.max(candidate_of(keys, tokens), axis=0))
    noise = gumbel_noise(tl.load(columns.seeds + slot), tl.load(rows.positions + row), tokens)
    noisy = tl.where(inside, key_of(values + noise), LEAST_KEY)
    tl.store(to.noisy + entry, tl.max(candidate_of(noisy, tokens), axis=0))


@triton.jit
def _weigh_chunks(
    rows: RowNumbers, columns: DrawColumns, of: ScaledRows, to: Masses, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Write a chunk of `to`, of rows that top-p alone cuts."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows.slots + row)
    if (tl.load(columns.top_ps + slot) < 1.0) & (tl.load(columns.top_ks + slot) == 0):
        top = _most(of.likeliest, row, of.chunks, CHUNKS)
        base = _least_kept(top, tl.load(columns.min_ps + slot))
        winner = _candidate_at(of, row, token_of(_most(of.noisy, row, of.chunks, CHUNKS)))
        candidates, values = _chunk_of(of, row, tl.program_id(0), CHUNK)
        weights = tl.where(candidates >= base, weights_of(values, value_of(top)), 0)
        entry = row * of.chunks + tl.program_id(0)
        tl.store(to.all + entry, tl.sum(weights, axis=0))
        tl.store(to.above + entry, tl.sum(tl.where(candidates > winner, weights, 0), axis=0))


@triton.jit
def _draw_filtered_rows(
    rows: RowNumbers,
    columns: DrawColumns,
    of: ScaledRows,
    masses: Masses,
    sampled,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write the token of one row."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows.slots + row)
    seed, position = tl.load(columns.seeds + slot), tl.load(rows.positions + row)
    top_p, top_k = tl.load(columns.top_ps + slot), tl.load(columns.top_ks + slot)
    top = _most(of.likeliest, row, of.chunks, CHUNKS)
    most = value_of(top)
    base = _least_kept(top, tl.load(columns.min_ps + slot))
    best = _most(of.noisy, row, of.chunks, CHUNKS)
    winner = _candidate_at(of, row, token_of(best))

    accepted = (top >> 32) == NAN_KEY
    weighed = top_k == 0
    limit = tl.zeros([], dtype=tl.int64)
    if (top_p < 1.0) & (accepted == 0):
        if top_k == 0:
            total = _sum_of(masses.all, row, of.chunks, CHUNKS)
        else:
            base = tl.maximum(base, _largest_but(of, row, top, top_k, CHUNK))
            total = _weight_above(of, row, base - 1, most, CHUNK)
        limit = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    while accepted == 0:
        if winner < base:
            best = _winner_from(of, row, base, seed, position, CHUNK, CHUNKS)
            winner = _candidate_at(of, row, token_of(best))
            weighed = top_k < 0  # never: what was weighed was above another one
        if top_p < 1.0:
            above = tl.zeros([], dtype=tl.int64)
            if weighed:
                above = _sum_of(masses.above, row, of.chunks, CHUNKS)
            else:
                above = _weight_above(of, row, winner, most, CHUNK)
            accepted = (above < limit) | (winner == top)
        elif top_k > 0:
            accepted = (_count_above(of, row, winner, CHUNK) < top_k) | (winner == top)
        else:
            accepted = winner >= base
        base = winner + 1
    tl.store(sampled + row, tl.where((top >> 32) == NAN_KEY, -1, token_of(best)).to(tl.int64))


@triton.jit
def _least_kept(top, min_p):
    """The least candidate that min-p leaves of a row with this best one: p >= min_p * p_max in logarithms."""
    floor = tl.where(min_p > 0.0, value_of(top) + log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    return key_of(floor).to(tl.int64) << 32


@triton.jit
def _most(of, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(of + row * chunks + chunk, mask=chunk < chunks, other=NOBODY), axis=0)


@triton.jit
def _sum_of(of, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(of + row * chunks + chunk, mask=chunk < chunks, other=0), axis=0)


@triton.jit
def _candidate_at(of: ScaledRows, row, token):
    """Without noise, of tokens of a row."""
    return candidate_of(key_of(tl.load(of.scaled + row * of.vocab + token)), token)


@triton.jit
def _chunk_of(of: ScaledRows, row, chunk, CHUNK: tl.constexpr):
    """Candidates and values of a chunk; outside the vocabulary they are below all others."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < of.vocab
    values = tl.load(of.scaled + row * of.vocab + tokens, mask=inside, other=-float("inf"))
    return candidate_of(tl.where(inside, key_of(values), LEAST_KEY), tokens), values


@triton.jit
def _weight_above(of: ScaledRows, row, edge, most, CHUNK: tl.constexpr):
    """What all candidates above `edge` weigh, by the row's largest value."""
    weights = tl.zeros([CHUNK], dtype=tl.int64)
    for chunk in range(of.chunks):
        if tl.load(of.likeliest + row * of.chunks + chunk) > edge:
            candidates, values = _chunk_of(of, row, chunk, CHUNK)
            weights += tl.where(candidates > edge, weights_of(values, most), 0)
    return tl.sum(weights, axis=0)


@triton.jit
def _count_above(of: ScaledRows, row, edge, CHUNK: tl.constexpr):
    counts = tl.zeros([CHUNK], dtype=tl.int32)
    for chunk in range(of.chunks):
        if tl.load(of.likeliest + row * of.chunks + chunk) > edge:
            candidates, _ = _chunk_of(of, row, chunk, CHUNK)
            counts += (candidates > edge).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _largest_but(of: ScaledRows, row, top, count, CHUNK: tl.constexpr):
    """The count-th largest candidate of a row, by bisection; one of the whole vocabulary is below it."""
    low, high = tl.full([], _LEAST, dtype=tl.int64), top
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reach = _count_above(of, row, middle - 1, CHUNK)
        low = tl.where(reach >= count, middle, low)
        high = tl.where(reach > count, high, tl.where(reach == count, low, middle - 1))
    return low


@triton.jit
def _winner_from(of: ScaledRows, row, base, seed, position, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The best candidate with noise among those that are `base` or above without it.

    Only chunks are read whose best of all is better than the best found so far and is not among these.
    """
    chunk = tl.arange(0, CHUNKS)
    noisy = tl.load(of.noisy + row * of.chunks + chunk, mask=chunk < of.chunks, other=NOBODY)
    tokens = tl.where(chunk < of.chunks, token_of(noisy), 0)
    best = tl.max(tl.where(_candidate_at(of, row, tokens) >= base, noisy, NOBODY), axis=0)
    for number in range(of.chunks):
        entry = row * of.chunks + number
        best_of_all = tl.load(of.noisy + entry)
        if (best_of_all > best) & (tl.load(of.likeliest + entry) >= base):
            candidates, values = _chunk_of(of, row, number, CHUNK)
            all_tokens = number * CHUNK + tl.arange(0, CHUNK)
            keys = key_of(values + gumbel_noise(seed, position, all_tokens))
            kept = tl.where(candidates >= base, candidate_of(keys, all_tokens), NOBODY)
            best = tl.maximum(best, tl.max(kept, axis=0))
    return best
