"""How far one distribution over tokens is from another, where of both only the likeliest tokens are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

REST_FLOOR = 1e-5
"""Probability below which what is left of a distribution counts as this much: log probabilities are float32, and the
sum of twenty of them is not known to more."""


@dataclass(frozen=True)
class TokenDivergence:
    """Of one place in a text. `kl` in nats; `same` whether the likeliest token is; `shift` the absolute difference of
    the log probabilities of the token that stands there, in nats."""

    kl: float
    same: bool
    shift: float


def token_divergence(token: int, reference: Mapping[int, float], served: Mapping[int, float]) -> TokenDivergence:
    """The rows hold log probabilities by token id, that of `token` among them. Raises KeyError without it."""
    return TokenDivergence(
        kl=kl_at_least(reference, served),
        same=not likeliest(reference).isdisjoint(likeliest(served)),
        shift=abs(served[token] - reference[token]),
    )


def kl_at_least(reference: Mapping[int, float], served: Mapping[int, float]) -> float:
    """A lower bound of KL(reference || served) in nats: 0 or more, and exactly 0 of equal rows.

    Tokens that both rows have keep their own terms, all others are one: what is left of 1 on either side. Merging
    outcomes never raises a divergence (log sum inequality: T. M. Cover and J. A. Thomas, "Elements of information
    theory", 2.7), so the true one is at least this, but for REST_FLOOR nats; how much larger it is depends on tails
    that nobody told.
    """
    shared = reference.keys() & served.keys()
    terms = [math.exp(reference[token]) * (reference[token] - served[token]) for token in sorted(shared)]
    left = [max(REST_FLOOR, 1.0 - math.fsum(math.exp(row[token]) for token in shared)) for row in (reference, served)]
    return max(0.0, math.fsum([*terms, left[0] * math.log(left[0] / left[1])]))


def likeliest(row: Mapping[int, float]) -> frozenset[int]:
    """All tokens with the greatest log probability: logits of bfloat16 are often equal."""
    most = max(row.values())
    return frozenset(token for token, logprob in row.items() if logprob == most)
