"""Finds answers that go round in circles: the same tokens, again and again, at their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOOP_MOST_TOKENS = 64  # of one round
LOOP_LEAST_ROUNDS = 4
LOOP_WINDOW = LOOP_MOST_TOKENS * (LOOP_LEAST_ROUNDS + 1)  # tokens that are looked at
LOOP_LEAST_TOKENS = 64  # of all rounds together: a ruled line, or a row of zeros, is none


@dataclass(frozen=True)
class RepetitionLimits:
    """Rounds of `least_size` to `most_size` tokens, `rounds` of them without anything between, are a loop."""

    most_size: int
    least_size: int = 1
    rounds: int = 2


class RepetitionDetector:
    """Reads one answer. A token costs `most_size` comparisons of integers.

    For every size of a round it counts how many tokens in a row equal the one that stands a round before them.
    """

    def __init__(self, limits: RepetitionLimits) -> None:
        self._limits = limits
        self._recent: list[int] = []  # the last `most_size` tokens, the newest first
        self._equal = [0] * (limits.most_size + 1)

    def push(self, token_id: int) -> None:
        equal = self._equal
        for size, earlier in enumerate(self._recent, start=1):
            equal[size] = equal[size] + 1 if earlier == token_id else 0
        self._recent.insert(0, token_id)
        del self._recent[self._limits.most_size :]

    @property
    def found(self) -> bool:
        """The last tokens are a loop."""
        return self.repeated_tokens > 0

    @property
    def repeated_tokens(self) -> int:
        """Tokens of the loop at the end; 0 where there is none."""
        limits = self._limits
        loops = [
            equal + size
            for size, equal in enumerate(self._equal)
            if size >= limits.least_size and equal >= (limits.rounds - 1) * size > 0
        ]
        return max(loops, default=0)


def ends_in_a_loop(token_ids: Iterable[int]) -> bool:
    """Whether an answer whose last LOOP_WINDOW tokens these are ended in a loop."""
    detector = RepetitionDetector(RepetitionLimits(LOOP_MOST_TOKENS, rounds=LOOP_LEAST_ROUNDS))
    for token_id in token_ids:
        detector.push(token_id)
    return detector.repeated_tokens >= LOOP_LEAST_TOKENS
