"""Ends a thought after so many tokens, whatever else constrains the answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelserve_worker.request import ThinkingBudget, TokenConstraint

_BITS = 32


class BudgetedThought:
    """A TokenConstraint: `inner`, and within a thought at most `budget.tokens` tokens, markers not counted.

    What is spent is spent: an answer that has no budget left begins no further thought. Where `inner` does not let the
    thought end, inside a character, it goes on for the token that completes it.
    """

    def __init__(self, budget: ThinkingBudget, inner: TokenConstraint | None) -> None:
        self._budget = budget
        self._inner = inner
        self._left = budget.tokens
        self._thinking = budget.begun
        self._before: list[tuple[int, bool]] = []  # each token that is proposed

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    @property
    def error(self) -> Exception | None:
        return None if self._inner is None else self._inner.error

    @property
    def dear(self) -> bool:
        return self._inner is not None and self._inner.dear

    def ready(self) -> bool:
        return self._inner is None or self._inner.ready()

    def propose(self, token_id: int) -> bool:
        if self._inner is not None and not self._inner.propose(token_id):
            return False
        self._before.append((self._left, self._thinking))
        self._count(token_id)
        return True

    def roll_back(self, count: int) -> None:
        if self._inner is not None:
            self._inner.roll_back(count)
        self._left, self._thinking = self._before[-count]
        del self._before[-count:]

    def consume(self, token_id: int) -> None:
        self._count(token_id)
        if self._inner is not None:
            self._inner.consume(token_id)

    def _count(self, token_id: int) -> None:
        if token_id == self._budget.opens:
            self._thinking = True
        elif token_id in self._budget.closes:
            self._thinking = False
        elif self._thinking:
            self._left -= 1

    def mask(self, row: NDArray[np.int32]) -> None:
        if self._inner is None:
            row[:] = -1
        else:
            self._inner.mask(row)
        if self._left > 0 or self.error is not None:
            return
        end, begin = self._budget.closes[0], self._budget.opens
        if not self._thinking:
            row[begin // _BITS] &= ~_bit(begin)
        elif row[end // _BITS] & _bit(end):
            row[:] = 0
            row[end // _BITS] = _bit(end)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % _BITS).astype(np.int32)
