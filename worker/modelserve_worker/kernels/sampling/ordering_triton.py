"""Candidates as kernels compare them: keys of values, tokens, the largest of many, and the noise of a draw.

Noise has the bits of `kernels.sampling.counter_random`. The k-th largest is found by bisection on the bits of the
values, exactly. Nothing is accumulated in floating point across threads, and nothing atomically.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from modelserve_worker.kernels.sampling import sampling

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no libdevice
MIN_TEMPERATURE = tl.constexpr(sampling.MIN_TEMPERATURE)
WEIGHT_UNIT = tl.constexpr(2.0**sampling.WEIGHT_BITS)
NOBODY = tl.constexpr(sampling.NOBODY)
NAN_KEY = tl.constexpr(sampling.NAN_KEY)
LEAST_KEY = tl.constexpr(-(1 << 31))  # below the key of -inf
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)  # the constants of SplitMix64, as in kernels.counter_random
_MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
_MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)


@triton.jit
def key_of(values):
    """Float32 values that are no NaN -> int32 of the same order; the two zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def candidate_of(keys, tokens):
    return (keys.to(tl.int64) << 32) + (tokens ^ 0x7FFFFFFF)


@triton.jit
def value_of(candidate):
    key = (candidate >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(candidate):
    return (candidate & 0xFFFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def gumbel_noise(seed, position, tokens):
    """Standard Gumbel noise float32 of (seed, position, token), as kernels.sampling.counter_random has it."""
    stream = _mix(_mix(seed + _GOLDEN) + position.to(tl.int64) * _GOLDEN)
    bits = _shift_right(_mix(stream + (tokens.to(tl.int64) + 1) * _GOLDEN), 24) | 1
    uniform = tl.minimum(bits.to(tl.float32) * (2.0**-40), 1.0 - 2.0**-24)
    return -log(-_log1p(-uniform))


@triton.jit
def _mix(words):
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


@triton.jit
def _shift_right(words, bits: tl.constexpr):
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def weights_of(values, largest):
    """Exp(value - largest) in units of 2^-40, int64. A value equal to the largest weighs 1 even where both are
    infinite; what a NaN makes of it is not used."""
    relative = tl.where(values < largest, values - largest, 0.0)
    return (exp(relative) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def largest(keys, low, wanted):
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
def write_largest(first, to, parts, width, wanted, PARTS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the `wanted` largest candidates of all parts, in the order in which they stand there."""
    entry = tl.arange(0, PARTS * CAPACITY)
    part, lane = entry // CAPACITY, entry % CAPACITY
    places = first + part * width + lane
    keys = (tl.load(places, mask=(part < parts) & (lane < wanted), other=NOBODY) >> 32).to(tl.int32)
    chosen, place = largest(keys, tl.min(keys, axis=0), wanted)
    tl.store(to + place, tl.load(places, mask=chosen), mask=chosen)  # read again: it would fill registers


# The functions below have the bits of PyTorch's on CUDA, which is built with the same library.


@triton.jit
def tanh(x):
    return (1.0 - 2.0 / (tl.exp(2.0 * x.to(tl.float64)) + 1.0)).to(tl.float32) if INTERPRETED else libdevice.tanh(x)


@triton.jit
def exp(x):
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def log(x):
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def times(x, y):
    """Rounded as a product: never one operation with the sum that it goes into."""
    return x * y if INTERPRETED else libdevice.mul_rn(x, y)


@triton.jit
def _log1p(x):
    if INTERPRETED:
        near_one = 1.0 + x.to(tl.float64)  # log1p(x) = log(u) x / (u - 1) for the rounded u = 1 + x (Kahan)
        result = (tl.log(near_one) * x / (near_one - 1.0)).to(tl.float32)
    else:
        result = libdevice.log1p(x)
    return result
