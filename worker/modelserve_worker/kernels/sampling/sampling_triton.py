"""Sampling by candidates on a GPU: the logits are read once, by programs that share out each row.

`_select_chunks` reduces a chunk of the vocabulary to the only tokens that can still win: the best one of a greedy or an
unfiltered row (its Gumbel noise already added), the top_k of a filtered one. `_merge_parts` reduces the chunks of a
rank's share in the same way, where ranks share the vocabulary; `_draw_rows` merges the parts of a row, which are its
chunks on one rank and else what the ranks have sent, and draws. The k-th largest is found by bisection on the bits of
the values, exactly. Nothing is accumulated in floating point across threads, and nothing atomically.

The plain reference is in `kernels.sampling.sampling`; noise has the bits of `kernels.sampling.counter_random`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from modelserve.sizing.activation import TOP_K_CAPACITY, VOCABULARY_CHUNK
from modelserve_worker.kernels.compiling.bundles import bundle, constant
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.sampling import sampling
from modelserve_worker.kernels.sampling.sampling import CandidateRows

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no libdevice
_MIN_TEMPERATURE = tl.constexpr(sampling.MIN_TEMPERATURE)
_WEIGHT_UNIT = tl.constexpr(2.0**sampling.WEIGHT_BITS)
_NOBODY = tl.constexpr(sampling.NOBODY)
_NAN_KEY = tl.constexpr(sampling.NAN_KEY)
_LEAST_KEY = tl.constexpr(-(1 << 31))  # below the key of -inf
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)  # the constants of SplitMix64, as in kernels.counter_random
_MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
_MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)

_CHUNK_WARPS = 8
_ROW_WARPS = 16


class SelectedRows(NamedTuple):
    """Rows of a step, parts of its buffer, as of `CandidateRows`."""

    slots: Tensor
    positions: Tensor
    output_counts: Tensor


@bundle
class SelectedColumns(NamedTuple):
    """Parameters by slot, as of `SlotColumns`."""

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    min_tokens: Tensor
    banned: Tensor
    BANNED: tl.constexpr


class TokenMasks(NamedTuple):
    """As of `CandidateRows`."""

    rows: Tensor
    words: Tensor


class TritonSampling:
    """Sampling by kernels. `chunk`: logits of one program, a power of two from TOP_K_CAPACITY; it changes no token."""

    def __init__(self, *, chunk: int = VOCABULARY_CHUNK) -> None:
        self._chunk = chunk

    def select(self, logits: Tensor, rows: CandidateRows, *, first_token: int) -> Tensor:
        (count, share), columns = logits.shape, rows.columns
        chunks = triton.cdiv(share, self._chunk)
        candidates = torch.empty(count, chunks, rows.width, dtype=torch.int64, device=logits.device)
        cap = 1.0 if rows.softcap is None else rows.softcap
        selected = SelectedColumns(
            columns.seeds, columns.temperature, columns.top_k, columns.min_tokens, columns.banned,
            constant(columns.banned.shape[1]),
        )  # fmt: skip
        masks = None if rows.masks is None or rows.mask_rows is None else TokenMasks(rows.mask_rows, rows.masks)
        launch(
            _select_chunks, (chunks, count),
            logits, SelectedRows(rows.slots, rows.positions, rows.output_counts), selected, candidates, masks,
            logits.stride(0), share, 0 if rows.masks is None else rows.masks.shape[1], first_token, rows.width, cap,
            1.0 / cap, CAPPED=rows.softcap is not None, CHUNK=self._chunk, CAPACITY=TOP_K_CAPACITY,
            num_warps=_CHUNK_WARPS,
        )  # fmt: skip
        return candidates

    def merge(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        (count, parts, width), columns = candidates.shape, rows.columns
        merged = torch.empty(count, width, dtype=torch.int64, device=candidates.device)
        launch(
            _merge_parts, (count,),
            candidates, merged, rows.slots, columns.temperature, columns.top_k, parts, width, PARTS=_padded(parts),
            CAPACITY=TOP_K_CAPACITY, num_warps=_ROW_WARPS,
        )  # fmt: skip
        return merged

    def draw(self, candidates: Tensor, rows: CandidateRows) -> Tensor:
        (count, parts, width), columns = candidates.shape, rows.columns
        finalists = torch.empty(count, width, dtype=torch.int64, device=candidates.device)
        tokens = torch.empty(count, dtype=torch.int64, device=candidates.device)
        launch(
            _draw_rows, (count,),
            candidates, finalists, rows.slots, rows.positions, columns.seeds, columns.temperature, columns.top_k,
            columns.top_p, columns.min_p, tokens, parts, width, PARTS=_padded(parts), CAPACITY=TOP_K_CAPACITY,
            num_warps=_ROW_WARPS,
        )  # fmt: skip
        return tokens


def _padded(parts: int) -> int:
    padded: int = triton.next_power_of_2(parts)
    assert padded * TOP_K_CAPACITY < 1 << 15, "more candidates a row than _largest can count"
    return padded


# Rows' slots, positions and counts are parts of a step's buffer, and the width is the batch's.
@triton.jit(do_not_specialize=["first_token", "width"], do_not_specialize_on_alignment=["rows"])
def _select_chunks(
    logits,
    rows: SelectedRows,
    columns: SelectedColumns,
    candidates,
    masks: TokenMasks,  # or None
    row_stride,
    share,
    mask_words,
    first_token,
    width,
    softcap,
    softcap_reciprocal,
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
    greedy = temperature < _MIN_TEMPERATURE
    wanted = _candidates_wanted(greedy, top_k, width)

    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = places < share
    tokens = first_token + places
    values = tl.load(logits + row * row_stride + places, mask=inside, other=0.0).to(tl.float32)
    broken = values != values
    values = tl.where(broken, -float("inf"), values)
    if CAPPED:
        values = _tanh(values * softcap_reciprocal) * softcap
    if masks is not None:
        mask = tl.load(masks.rows + row).to(tl.int64)
        words = masks.words + mask * mask_words + tokens // 32
        word = tl.load(words, mask=inside & (mask >= 0), other=-1)
        values = tl.where(((word >> (tokens % 32)) & 1) != 0, values, -float("inf"))
    if tl.load(rows.output_counts + row) < tl.load(columns.min_tokens + slot):
        for i in tl.static_range(columns.BANNED):
            values = tl.where(tokens == tl.load(columns.banned + slot * columns.BANNED + i), -float("inf"), values)
    values = tl.div_rn(values, tl.where(greedy, 1.0, temperature))
    if (top_k == 0) & (temperature >= _MIN_TEMPERATURE):
        values += _gumbel_noise(tl.load(columns.seeds + slot), tl.load(rows.positions + row), tokens)
    keys = tl.where(inside, tl.where(broken, _NAN_KEY, _key(values)), _LEAST_KEY)

    first = candidates + entry * width
    if wanted == 1:
        tl.store(first, tl.max(_candidate(keys, tokens), axis=0))
    else:
        # As many keys as there are groups, and no fewer than wanted, reach the least of the groups' largest.
        groups = tl.reshape(keys, [CAPACITY, CHUNK // CAPACITY], can_reorder=True)
        chosen, place = _largest(keys, tl.min(tl.max(groups, axis=1), axis=0), wanted)
        tl.store(first + place, _candidate(keys, tokens), mask=chosen)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots"])
def _merge_parts(
    candidates, merged, slots, temperatures, top_ks, parts, width, PARTS: tl.constexpr, CAPACITY: tl.constexpr
):
    """Write the best candidates of all parts of one row: int64 [S, width]."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wanted = _candidates_wanted(tl.load(temperatures + slot) < _MIN_TEMPERATURE, tl.load(top_ks + slot), width)
    first = candidates + row * parts * width
    if wanted == 1:
        tl.store(merged + row * width, _best_of_parts(first, parts, width, PARTS))
    else:
        _write_largest(first, merged + row * width, parts, width, wanted, PARTS, CAPACITY)


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
    wanted = _candidates_wanted(tl.load(temperatures + slot) < _MIN_TEMPERATURE, tl.load(top_ks + slot), width)
    first = candidates + row * parts * width
    if wanted == 1:
        top = _best_of_parts(first, parts, width, PARTS)
        best = top
    else:
        mine = finalists + row * width
        _write_largest(first, mine, parts, width, wanted, PARTS, CAPACITY)
        tl.debug_barrier()  # the threads that read the finalists are not those that wrote them
        lane = tl.arange(0, CAPACITY)
        final = tl.load(mine + lane, mask=lane < wanted, other=_NOBODY)
        top = tl.max(final, axis=0)
        noise = _gumbel_noise(tl.load(seeds + slot), tl.load(positions + row), _token(final))
        best = _draw(final, noise, tl.load(top_ps + slot), tl.load(min_ps + slot))
    tl.store(sampled + row, tl.where((top >> 32) == _NAN_KEY, -1, _token(best)).to(tl.int64))


@triton.jit
def _best_of_parts(first, parts, width, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(first + part * width, mask=part < parts, other=_NOBODY), axis=0)


@triton.jit
def _write_largest(first, to, parts, width, wanted, PARTS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the `wanted` largest candidates of all parts, in the order in which they stand there."""
    entry = tl.arange(0, PARTS * CAPACITY)
    part, lane = entry // CAPACITY, entry % CAPACITY
    places = first + part * width + lane
    keys = (tl.load(places, mask=(part < parts) & (lane < wanted), other=_NOBODY) >> 32).to(tl.int32)
    chosen, place = _largest(keys, tl.min(keys, axis=0), wanted)
    tl.store(to + place, tl.load(places, mask=chosen), mask=chosen)  # read again: it would fill registers


@triton.jit
def _draw(final, noise, top_p, min_p):
    """The winner, as a candidate, among candidates int64 [N] after min-p and top-p."""
    top = tl.max(final, axis=0)
    largest = _value(top)
    values = _value(final)
    floor = tl.where(min_p > 0.0, largest + _log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    kept = (final > _NOBODY) & (values >= floor)
    # A value equal to the largest weighs 1 even where both are infinite; what a NaN makes of the weights is not used.
    relative = tl.where(values < largest, values - largest, 0.0)
    weights = tl.where(kept, _exp(relative) * _WEIGHT_UNIT, 0.0).to(tl.int64)
    before = tl.sum(tl.where(final[None, :] > final[:, None], weights[None, :], 0), axis=1)
    total = tl.sum(weights, axis=0).to(tl.float64)
    limit = tl.where(top_p >= 1.0, total + 1.0, top_p.to(tl.float64) * total)  # at 1 a tail that weighs nothing stays
    kept = kept & ((before.to(tl.float64) < limit) | (final == top))
    scores = tl.where(kept, values + noise, -float("inf"))
    keys = tl.where(final > _NOBODY, _key(scores), _LEAST_KEY)
    return tl.max(_candidate(keys, _token(final)), axis=0)


@triton.jit
def _candidates_wanted(greedy, top_k, width):
    """A row that is not for these kernels is cut to what there is room for."""
    return tl.where(greedy | (top_k == 0), 1, tl.minimum(top_k, width))


@triton.jit
def _largest(keys, low, wanted):
    """Which `wanted` keys int32 [N] are the largest, the first ones among equals, and their places in a compact array.

    Bisection for the largest key that at least `wanted` keys reach; `low` is one that they do reach. N < 2^15.
    """
    high = tl.max(keys, axis=0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        high = tl.where(count > wanted, high, tl.where(count == wanted, middle, middle - 1))
        low = tl.where(count >= wanted, middle, low)
    above = keys > low
    equal = keys == low
    equals_wanted = wanted - tl.sum(above.to(tl.int32), axis=0)
    # One scan counts both, in two halves of a word.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    equals = counts >> 16
    chosen = above | (equal & (equals <= equals_wanted))
    return chosen, (counts & 0xFFFF) + tl.minimum(equals, equals_wanted) - 1


@triton.jit
def _key(values):
    """Float32 values that are no NaN -> int32 of the same order; the two zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _candidate(keys, tokens):
    return (keys.to(tl.int64) << 32) + (tokens ^ 0x7FFFFFFF)


@triton.jit
def _value(candidate):
    key = (candidate >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _token(candidate):
    return (candidate & 0xFFFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _gumbel_noise(seed, position, tokens):
    """Standard Gumbel noise float32 of (seed, position, token), as kernels.sampling.counter_random has it."""
    stream = _mix(_mix(seed + _GOLDEN) + position.to(tl.int64) * _GOLDEN)
    bits = _shift_right(_mix(stream + (tokens.to(tl.int64) + 1) * _GOLDEN), 24) | 1
    uniform = tl.minimum(bits.to(tl.float32) * (2.0**-40), 1.0 - 2.0**-24)
    return -_log(-_log1p(-uniform))


@triton.jit
def _mix(words):
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


@triton.jit
def _shift_right(words, bits: tl.constexpr):
    return (words >> bits) & ((1 << (64 - bits)) - 1)


# The functions below have the bits of PyTorch's on CUDA, which is built with the same library.


@triton.jit
def _tanh(x):
    return (1.0 - 2.0 / (tl.exp(2.0 * x.to(tl.float64)) + 1.0)).to(tl.float32) if _INTERPRETED else libdevice.tanh(x)


@triton.jit
def _exp(x):
    return tl.exp(x) if _INTERPRETED else libdevice.exp(x)


@triton.jit
def _log(x):
    return tl.log(x) if _INTERPRETED else libdevice.log(x)


@triton.jit
def _log1p(x):
    if _INTERPRETED:
        near_one = 1.0 + x.to(tl.float64)  # log1p(x) = log(u) x / (u - 1) for the rounded u = 1 + x (Kahan)
        result = (tl.log(near_one) * x / (near_one - 1.0)).to(tl.float32)
    else:
        result = libdevice.log1p(x)
    return result
