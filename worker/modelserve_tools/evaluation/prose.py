"""Filler: plain sentences that hold no key and no value."""

from __future__ import annotations

import random
from collections.abc import Iterator

from modelserve_tools.evaluation.words import DEEDS, MANNERS, MOVES, PEOPLE, PLACES, THINGS, TIMES

_PATTERNS: tuple[str, ...] = (
    "The {person} {move} {manner}",
    "The {person} {deed} the {thing}",
    "A {person} {deed} a {thing} {manner}",
    "The {person} {move} to the {place}",
    "The {person} {deed} the {thing} this {time}",
    "Every {time} the {person} {move} near the {place}",
    "The {person} {move} from the {place} with the {other}",
    "The {person} {deed} the {thing} before the {other} {move}",
    "Every {time} a {person} {deed} the {thing} in the {place}",
)
_TOKENS = {pattern: len(pattern.split()) + 1 for pattern in _PATTERNS}  # one a word, and the full stop
_SHORTEST = min(_TOKENS.values())
_LONGEST = max(_TOKENS.values())
TOLERANCE = _SHORTEST // 2


def sentences(rng: random.Random, tokens: int) -> Iterator[tuple[str, int]]:
    """Sentences and their tokens, in all `tokens` give or take TOLERANCE; none when `tokens` is at most TOLERANCE."""
    left = tokens
    while left > TOLERANCE:
        patterns = _PATTERNS
        if left < _LONGEST:
            patterns = tuple(pattern for pattern in _PATTERNS if _TOKENS[pattern] <= left + TOLERANCE)
        pattern = rng.choice(patterns)
        yield _sentence(rng, pattern), _TOKENS[pattern]
        left -= _TOKENS[pattern]


def _sentence(rng: random.Random, pattern: str) -> str:
    return (
        pattern.format(
            person=rng.choice(PEOPLE),
            other=rng.choice(PEOPLE),
            move=rng.choice(MOVES),
            deed=rng.choice(DEEDS),
            thing=rng.choice(THINGS),
            place=rng.choice(PLACES),
            manner=rng.choice(MANNERS),
            time=rng.choice(TIMES),
        )
        + "."
    )
