"""Sampling by candidates on a GPU: the logits are read once, by programs that share out each row.

`_select_chunks` reduces a chunk of the vocabulary to the only tokens that can still win: the best one of a greedy or an
unfiltered row (its Gumbel noise already added), the top_k of a filtered one. `_merge_parts` reduces the chunks of a
rank's share in the same way, where ranks share the vocabulary; `_draw_rows` merges the parts of a row, which are its
chunks on one rank and else what the ranks have sent, and draws.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelserve.sizing.activation import TOP_K_CAPACITY
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
from modelserve_worker.kernels.sampling.ordering_triton import (
    LEAST_KEY,
    MIN_TEMPERATURE,
    NAN_KEY,
    NOBODY,
    candidate_of,
    gumbel_noise,
    key_of,
    largest,
    log,
    token_of,
    value_of,
    weights_of,
    write_largest,
)
from modelserve_worker.kernels.sampling.sampling import SampledRows

CHUNK_WARPS = 8
ROW_WARPS = 16


class SelectedColumns(NamedTuple):
    """Parameters by slot, as of `SlotColumns`."""

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor


def select(logits: Tensor, rows: SampledRows, *, first_token: int, chunk: int) -> Tensor:
    """See SamplingBackend."""
    (count, share), columns = logits.shape, rows.columns
    chunks = triton.cdiv(share, chunk)
    candidates = torch.empty(count, chunks, rows.width, dtype=torch.int64, device=logits.device)
    launch(
        _select_chunks, (chunks, count),
        logits, row_numbers(rows), SelectedColumns(columns.seeds, columns.temperature, columns.top_k), candidates,
        token_masks(rows), slot_adjustments(rows), softcap_of(rows.softcap), logits.stride(0), share, first_token,
        rows.width, CAPPED=rows.softcap is not None, CHUNK=chunk, CAPACITY=TOP_K_CAPACITY, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    return candidates


def merge(candidates: Tensor, rows: SampledRows) -> Tensor:
    """See SamplingBackend."""
    (count, parts, width), columns = candidates.shape, rows.columns
    merged = torch.empty(count, width, dtype=torch.int64, device=candidates.device)
    launch(
        _merge_parts, (count,),
        candidates, merged, rows.slots, columns.temperature, columns.top_k, parts, width,
        PARTS=padded(parts, TOP_K_CAPACITY), CAPACITY=TOP_K_CAPACITY, num_warps=ROW_WARPS,
    )  # fmt: skip
    return merged


def draw(candidates: Tensor, rows: SampledRows) -> Tensor:
    """See SamplingBackend."""
    (count, parts, width), columns = candidates.shape, rows.columns
    finalists = torch.empty(count, width, dtype=torch.int64, device=candidates.device)
    tokens = torch.empty(count, dtype=torch.int64, device=candidates.device)
    launch(
        _draw_rows, (count,),
        candidates, finalists, rows.slots, rows.positions, columns.seeds, columns.temperature, columns.top_k,
        columns.top_p, columns.min_p, tokens, parts, width, PARTS=padded(parts, TOP_K_CAPACITY),
        CAPACITY=TOP_K_CAPACITY, num_warps=ROW_WARPS,
    )  # fmt: skip
    return tokens


def padded(parts: int, capacity: int) -> int:
    """Parts of a row as kernels count them, of so many candidates each."""
    count: int = triton.next_power_of_2(parts)
    assert count * capacity < 1 << 15, "more candidates a row than `largest` can count"
    return count


# Rows' slots, positions and counts are parts of a step's buffer, and the width is the batch's.
@triton.jit(do_not_specialize=["first_token", "width"], do_not_specialize_on_alignment=["rows"])
def _select_chunks(
    logits,
    rows: RowNumbers,
    columns: SelectedColumns,
    candidates,
    masks: TokenMasks,  # or None
    adjustments: SlotAdjustments,  # or None
    softcap: Softcap,
    row_stride,
    share,
    first_token,
    width,
    CAPPED: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Write the candidates of a chunk of a share of the vocabulary, in order of token id: int64 [S, chunks, width]."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(1).to(tl.int64)
    entry = row * tl.num_programs(0) + tl.program_id(0)
    slot = tl.load(rows.slots + row)
    temperature = tl.load(columns.temperatures + slot)
    top_k = tl.load(columns.top_ks + slot)
    greedy = temperature < MIN_TEMPERATURE
    wanted = _candidates_wanted(greedy, top_k, width)

    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = places < share
    tokens = first_token + places
    values = tl.load(logits + row * row_stride + places, mask=inside, other=0.0).to(tl.float32)
    values, broken = capped(values, softcap, CAPPED)
    values = adjusted(values, tokens, inside, row, slot, rows.output_counts, masks, adjustments, CHUNK)
    values = tl.div_rn(values, tl.where(greedy, 1.0, temperature))
    if (top_k == 0) & (temperature >= MIN_TEMPERATURE):
        values += gumbel_noise(tl.load(columns.seeds + slot), tl.load(rows.positions + row), tokens)
    keys = tl.where(inside, tl.where(broken, NAN_KEY, key_of(values)), LEAST_KEY)

    first = candidates + entry * width
    if wanted == 1:
        tl.store(first, tl.max(candidate_of(keys, tokens), axis=0))
    else:
        # As many keys as there are groups, and no fewer than wanted, reach the least of the groups' largest.
        groups = tl.reshape(keys, [CAPACITY, CHUNK // CAPACITY], can_reorder=True)
        chosen, place = largest(keys, tl.min(tl.max(groups, axis=1), axis=0), wanted)
        tl.store(first + place, candidate_of(keys, tokens), mask=chosen)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots"])
def _merge_parts(
    candidates, merged, slots, temperatures, top_ks, parts, width, PARTS: tl.constexpr, CAPACITY: tl.constexpr
):
    """Write the best candidates of all parts of one row: int64 [S, width]."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wanted = _candidates_wanted(tl.load(temperatures + slot) < MIN_TEMPERATURE, tl.load(top_ks + slot), width)
    first = candidates + row * parts * width
    if wanted == 1:
        tl.store(merged + row * width, _best_of_parts(first, parts, width, PARTS))
    else:
        write_largest(first, merged + row * width, parts, width, wanted, PARTS, CAPACITY)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots", "positions"])
def _draw_rows(
    candidates,
    finalists,
    slots,
    positions,
    seeds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    sampled,
    parts,
    width,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Merge the candidates of one row, filter them, draw one and write its token."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wanted = _candidates_wanted(tl.load(temperatures + slot) < MIN_TEMPERATURE, tl.load(top_ks + slot), width)
    first = candidates + row * parts * width
    if wanted == 1:
        top = _best_of_parts(first, parts, width, PARTS)
        best = top
    else:
        mine = finalists + row * width
        write_largest(first, mine, parts, width, wanted, PARTS, CAPACITY)
        tl.debug_barrier()  # the threads that read the finalists are not those that wrote them
        lane = tl.arange(0, CAPACITY)
        final = tl.load(mine + lane, mask=lane < wanted, other=NOBODY)
        top = tl.max(final, axis=0)
        noise = gumbel_noise(tl.load(seeds + slot), tl.load(positions + row), token_of(final))
        best = _draw(final, noise, tl.load(top_ps + slot), tl.load(min_ps + slot))
    tl.store(sampled + row, tl.where((top >> 32) == NAN_KEY, -1, token_of(best)).to(tl.int64))


@triton.jit
def _best_of_parts(first, parts, width, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(first + part * width, mask=part < parts, other=NOBODY), axis=0)


@triton.jit
def _draw(final, noise, top_p, min_p):
    """The winner, as a candidate, among candidates int64 [N] after min-p and top-p."""
    top = tl.max(final, axis=0)
    most = value_of(top)
    values = value_of(final)
    floor = tl.where(min_p > 0.0, most + log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    kept = (final > NOBODY) & (values >= floor)
    weights = tl.where(kept, weights_of(values, most), 0)
    before = tl.sum(tl.where(final[None, :] > final[:, None], weights[None, :], 0), axis=1)
    total = tl.sum(weights, axis=0).to(tl.float64)
    limit = tl.where(top_p >= 1.0, total + 1.0, top_p.to(tl.float64) * total)  # at 1 a tail that weighs nothing stays
    kept = kept & ((before.to(tl.float64) < limit) | (final == top))
    scores = tl.where(kept, values + noise, -float("inf"))
    keys = tl.where(final > NOBODY, key_of(scores), LEAST_KEY)
    return tl.max(candidate_of(keys, token_of(final)), axis=0)


@triton.jit
def _candidates_wanted(greedy, top_k, width):
    """A row that is not for these kernels is cut to what there is room for."""
    return tl.where(greedy | (top_k == 0), 1, tl.minimum(top_k, width))
