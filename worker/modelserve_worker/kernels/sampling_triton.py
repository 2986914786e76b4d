"""Filters and the draw of one token per row on a GPU: the logits are read once, by programs that share out each row.

`_select_chunks` reduces a chunk of the vocabulary to the only tokens that can still win: the best one of a greedy or an
unfiltered row (its Gumbel noise already added), the top_k of a filtered one. `_draw_rows` merges the chunks of a row.
A candidate is one 64-bit word whose order is the order of selection: the value's bits made monotone, then the token id
complemented, so ties fall to the lower id. The k-th largest is found by bisection on these bits, exactly. Nothing is
accumulated in floating point across threads, and nothing atomically.

The plain twin is `kernels.sampling`; noise has the bits of `kernels.counter_random`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from modelserve.sizing.activation import TOP_K_CAPACITY, VOCABULARY_CHUNK
from modelserve_worker.kernels import sampling
from modelserve_worker.kernels.specimen import KernelSpecimen

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no libdevice
_MIN_TEMPERATURE = tl.constexpr(sampling.MIN_TEMPERATURE)
_WEIGHT_UNIT = tl.constexpr(2.0**sampling.WEIGHT_BITS)
_NOBODY = tl.constexpr(-(1 << 63) + 1)  # below every candidate
_LEAST_KEY = tl.constexpr(-(1 << 31))  # below the key of -inf
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)  # the constants of SplitMix64, as in kernels.counter_random
_MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
_MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)

_CHUNK_WARPS = 8
_ROW_WARPS = 16


def draw_tokens(
    logits: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
    output_counts: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    min_tokens: Tensor,
    banned: Tensor,
    softcap: float | None,
    mask_rows: Tensor | None = None,
    masks: Tensor | None = None,
    chunk: int = VOCABULARY_CHUNK,
    capacity: int = TOP_K_CAPACITY,
) -> Tensor:
    """One token per row of raw logits [S, vocab] (rows contiguous), softcapped while they are read: int64 [S].

    slots, positions and output_counts int32 [S]; the parameters are by slot: seeds int64, top_k, min_tokens and banned
    [slots, 8] (-1: no token) int32, the others float32. A row with top_k > capacity, or with top_k 0 and top_p < 1 or
    min_p > 0, gets a token that means nothing. -1: the row held a NaN. `chunk` and `capacity` are powers of two,
    capacity <= chunk; neither changes a token. A row whose entry in `mask_rows` int32 [S] is m >= 0 may only get tokens
    whose bit in masks[m], int32 [C, ceil(vocab / 32)] contiguous, is set; at least one is.
    """
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, chunk)
    assert triton.next_power_of_2(chunks) * capacity < 1 << 15, "more candidates a row than _largest can count"
    candidates = torch.empty(rows, chunks, capacity, dtype=torch.int64, device=logits.device)
    finalists = torch.empty(rows, capacity, dtype=torch.int64, device=logits.device)
    not_a_number = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cap = 1.0 if softcap is None else softcap
    _select_chunks[(chunks, rows)](
        logits, slots, positions, output_counts, seeds, temperature, top_k, min_tokens, banned, candidates,
        not_a_number, mask_rows, masks, logits.stride(0), vocab_size, cap, 1.0 / cap, BANNED=banned.shape[1],
        CAPPED=softcap is not None, MASKED=masks is not None, CHUNK=chunk, CAPACITY=capacity, num_warps=_CHUNK_WARPS,
    )  # fmt: skip
    _draw_rows[(rows,)](
        candidates, finalists, not_a_number, slots, positions, seeds, temperature, top_k, top_p, min_p, tokens, chunks,
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "output_counts"])  # parts of a step's buffer
def _select_chunks(
    logits,
    slots,
    positions,
    output_counts,
    seeds,
    temperatures,
    top_ks,
    min_tokens,
    banned,
    candidates,
    not_a_number,
    mask_rows,
    masks,
    row_stride,
    vocab_size,
    softcap,
    softcap_reciprocal,
    BANNED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Write a chunk's candidates int64 [S, chunks, CAPACITY], in order of token id, and whether it held a NaN."""
    row = tl.program_id(1).to(tl.int64)
    entry = row * tl.num_programs(0) + tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    greedy = temperature < _MIN_TEMPERATURE
    wanted = _candidates_wanted(greedy, top_k, CAPACITY)

    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    values = tl.load(logits + row * row_stride + tokens, mask=inside, other=0.0).to(tl.float32)
    broken = values != values
    tl.store(not_a_number + entry, tl.max(broken.to(tl.int32), axis=0))
    values = tl.where(broken, -float("inf"), values)
    if CAPPED:
        values = _tanh(values * softcap_reciprocal) * softcap
    if MASKED:
        mask = tl.load(mask_rows + row).to(tl.int64)
        words = masks + mask * ((vocab_size + 31) // 32) + tokens // 32
        word = tl.load(words, mask=inside & (mask >= 0), other=-1)
        values = tl.where(((word >> (tokens % 32)) & 1) != 0, values, -float("inf"))
    if tl.load(output_counts + row) < tl.load(min_tokens + slot):
        for i in tl.static_range(BANNED):
            values = tl.where(tokens == tl.load(banned + slot * BANNED + i), -float("inf"), values)
    values = tl.div_rn(values, tl.where(greedy, 1.0, temperature))
    if (top_k == 0) & (temperature >= _MIN_TEMPERATURE):
        values += _gumbel_noise(tl.load(seeds + slot), tl.load(positions + row), tokens)
    keys = tl.where(inside, _key(values), _LEAST_KEY)

    first = candidates + entry * CAPACITY
    if wanted == 1:
        tl.store(first, tl.max(_candidate(keys, tokens), axis=0))
    else:
        # As many keys as there are groups, and no fewer than wanted, reach the least of the groups' largest.
        groups = tl.reshape(keys, [CAPACITY, CHUNK // CAPACITY], can_reorder=True)
        chosen, place = _largest(keys, tl.min(tl.max(groups, axis=1), axis=0), wanted)
        tl.store(first + place, _candidate(keys, tokens), mask=chosen)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _draw_rows(
    candidates,
    finalists,
    not_a_number,
    slots,
    positions,
    seeds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    sampled,
    chunks,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Merge the candidates of one row, filter them, draw one and write its token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wanted = _candidates_wanted(tl.load(temperatures + slot) < _MIN_TEMPERATURE, tl.load(top_ks + slot), CAPACITY)
    chunk = tl.arange(0, CHUNKS)
    broken = tl.max(tl.load(not_a_number + row * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
    first = candidates + row * chunks * CAPACITY
    if wanted == 1:
        best = tl.max(tl.load(first + chunk * CAPACITY, mask=chunk < chunks, other=_NOBODY), axis=0)
    else:
        entry = tl.arange(0, CHUNKS * CAPACITY)
        filled = (entry < chunks * CAPACITY) & (entry % CAPACITY < wanted)
        keys = (tl.load(first + entry, mask=filled, other=_NOBODY) >> 32).to(tl.int32)
        chosen, place = _largest(keys, tl.min(keys, axis=0), wanted)
        mine = finalists + row * CAPACITY
        tl.store(mine + place, tl.load(first + entry, mask=chosen), mask=chosen)  # read again: it would fill registers
        tl.debug_barrier()  # the threads that read the finalists are not those that wrote them
        lane = tl.arange(0, CAPACITY)
        final = tl.load(mine + lane, mask=lane < wanted, other=_NOBODY)
        noise = _gumbel_noise(tl.load(seeds + slot), tl.load(positions + row), _token(final))
        best = _draw(final, noise, tl.load(top_ps + slot), tl.load(min_ps + slot))
    tl.store(sampled + row, tl.where(broken != 0, -1, _token(best)).to(tl.int64))


@triton.jit
def _draw(final, noise, top_p, min_p):
    """The winner, as a candidate, among candidates int64 [N] after min-p and top-p."""
    top = tl.max(final, axis=0)
    largest = _value(top)
    values = _value(final)
    floor = tl.where(min_p > 0.0, largest + _log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    kept = (final > _NOBODY) & (values >= floor)
    # A value equal to the largest weighs 1 even where both are infinite.
    relative = tl.where(values == largest, 0.0, values - largest)
    weights = tl.where(kept, _exp(relative) * _WEIGHT_UNIT, 0.0).to(tl.int64)
    before = tl.sum(tl.where(final[None, :] > final[:, None], weights[None, :], 0), axis=1)
    total = tl.sum(weights, axis=0).to(tl.float64)
    limit = tl.where(top_p >= 1.0, total + 1.0, top_p.to(tl.float64) * total)  # at 1 a tail that weighs nothing stays
    kept = kept & ((before.to(tl.float64) < limit) | (final == top))
    scores = tl.where(kept, values + noise, -float("inf"))
    keys = tl.where(final > _NOBODY, _key(scores), _LEAST_KEY)
    return tl.max(_candidate(keys, _token(final)), axis=0)


@triton.jit
def _candidates_wanted(greedy, top_k, CAPACITY: tl.constexpr):
    """A row that is not for these kernels is cut to what there is room for."""
    return tl.where(greedy | (top_k == 0), 1, tl.minimum(top_k, CAPACITY))


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
    """Standard Gumbel noise float32 of (seed, position, token), as kernels.counter_random has it."""
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


def _specimens(vocab_size: int, dtype: str) -> list[KernelSpecimen]:
    by_slot = {"seeds": "*i64", "temperatures": "*fp32", "top_ks": "*i32"}
    rows = {"slots": "*i32", "positions": "*i32"}
    chunks = triton.cdiv(vocab_size, VOCABULARY_CHUNK)
    masks = {"mask_rows": "*i32", "masks": "*i32"}
    select = [
        KernelSpecimen(
            _select_chunks,
            {"logits": dtype, **rows, "output_counts": "*i32", **by_slot, "min_tokens": "*i32", "banned": "*i32"}
            | {"candidates": "*i64", "not_a_number": "*i32", **(masks if masked else {})}
            | {"row_stride": "i32", "vocab_size": "i32", "softcap": "fp32", "softcap_reciprocal": "fp32"},
            {"BANNED": 8, "CAPPED": True, "MASKED": masked, "CHUNK": VOCABULARY_CHUNK, "CAPACITY": TOP_K_CAPACITY}
            | ({} if masked else dict.fromkeys(masks)),
            num_warps=_CHUNK_WARPS,
            multiples_of_16=frozenset({"row_stride", "vocab_size"}),
        )
        for masked in (False, True)
    ]
    draw = KernelSpecimen(
        _draw_rows,
        {"candidates": "*i64", "finalists": "*i64", "not_a_number": "*i32", **rows, **by_slot}
        | {"top_ps": "*fp32", "min_ps": "*fp32", "sampled": "*i64", "chunks": "i32"},
        {"CHUNKS": triton.next_power_of_2(chunks), "CAPACITY": TOP_K_CAPACITY},
        num_warps=_ROW_WARPS,
        multiples_of_16=frozenset({"chunks"}),
        spilled_bytes=16,
    )
    return [*select, draw]


SPECIMENS = tuple(_specimens(262_144, "*bf16"))
