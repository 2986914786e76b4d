"""What may follow in one answer: the state of its grammar after the tokens sampled so far."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

_BITS = 32


class GrammarMatcher:
    """A TokenConstraint over a copy of `compiled`, which is this answer's own.

    `eos_token_ids` are the model's, and end an answer that is whole. `stop_token_ids`, the request's own, may then
    follow too. Below `min_tokens` tokens neither may, and with `ignore_eos` the model's may not, while the grammar
    lets anything else follow.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._compiled = compiled
        self.matcher: LLMatcher = compiled.deep_copy()
        self._stops = _positions(stop_token_ids)
        self._end_token_ids = frozenset((*eos_token_ids, *stop_token_ids))
        self._ends = _positions(self._end_token_ids)
        self._eos = _positions(eos_token_ids)
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []  # consumed, those that are proposed included
        self._refused: int | None = None

    @property
    def complete(self) -> bool:
        """The grammar lets nothing follow."""
        return bool(self.matcher.is_stopped()) and self.error is None

    @property
    def error(self) -> str | None:
        if self._refused is not None:
            return f"token {self._refused} does not match the grammar of the answer"
        if self.matcher.is_error():
            return f"the grammar of the answer is too complex to follow: {self.matcher.get_error().splitlines()[0]}"
        return None

    def consume(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if not self.matcher.consume_token(token_id) and not self.matcher.is_error():
            self._refused = token_id

    def propose(self, token_id: int) -> bool:
        """Go on as if the token were sampled, until `roll_back`; False, and nothing has changed, where it cannot be or
        would end the answer."""
        if token_id in self._end_token_ids or self.matcher.is_stopped():
            return False
        if self.matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._token_ids.append(token_id)
        return True

    def roll_back(self, count: int) -> None:
        """Take back the last `count` tokens. What was too complex behind them is no fault of the answer."""
        broken = self.matcher.is_error() or not self.matcher.rollback(count)
        del self._token_ids[len(self._token_ids) - count :]
        if broken:
            self.matcher = self._compiled.deep_copy()
            self.matcher.consume_tokens(self._token_ids)

    def adjust(self, row: NDArray[np.int32]) -> None:
        """From the tokens that the grammar lets follow, int32 [ceil(vocab / 32)], to those that may be sampled."""
        early = len(self._token_ids) < self._min_tokens
        if len(self._stops[0]) and not early and self.matcher.is_accepting():
            np.bitwise_or.at(row, *self._stops)
        barred = self._ends if early else self._eos if self._ignore_eos else None
        if barred is not None:
            words, bits = barred
            others = row.copy()
            np.bitwise_and.at(others, words, ~bits)
            if others.any():
                row[:] = others


def is_allowed(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask lets a token follow."""
    return bool(row[token_id // _BITS] >> (token_id % _BITS) & 1)


def _positions(token_ids: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Words of a mask and the bits of these tokens in them."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    return ids // _BITS, (np.uint32(1) << (ids % _BITS).astype(np.uint32)).view(np.int32)
