"""Random numbers that are a function of (seed, position, token) alone: the same on every rank and in every batch.

The hash is the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
applied to a counter whose stream is chosen by hashing the seed and then the position.
"""

from __future__ import annotations

from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed word
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def gumbel_noise(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [N, K] for seeds and positions int64 [N], and tokens int64 [K] or [N, K].

    argmax(logits + noise) draws from softmax(logits). -log(u) is formed from 40 random bits, so that small values,
    which win, keep full float32 precision.
    """
    stream = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    bits = _shift_right(_mix(stream[:, None] + (tokens + 1) * _GOLDEN), 24) | 1
    # 1 - u with u uniform: in (0, 1), never exactly 1, so both logarithms stay finite.
    below_one = (bits.float() * 2.0**-40).clamp_(max=1.0 - 2.0**-24)
    return below_one.neg_().log1p_().neg_().log_().neg_()


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
