"""What may follow in one answer: the state of its grammar after the tokens sampled so far."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

_BITS = 32


class GrammarMatcher:
    """A TokenConstraint over `matcher`, which is this answer's own.

    `eos_token_ids` are the model's, and end an answer that is whole. `stop_token_ids`, the request's own, may then
    follow too. Below `min_tokens` tokens neither may, and with `ignore_eos` the model's may not, while the grammar
    lets anything else follow.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.matcher = matcher
        self._stops = _positions(stop_token_ids)
        self._ends = _positions({*eos_token_ids, *stop_token_ids})
        self._eos = _positions(eos_token_ids)
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._num_tokens = 0
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
        self._num_tokens += 1
        if not self.matcher.consume_token(token_id) and not self.matcher.is_error():
            self._refused = token_id

    def adjust(self, row: NDArray[np.int32]) -> None:
        """From the tokens that the grammar lets follow, int32 [ceil(vocab / 32)], to those that may be sampled."""
        early = self._num_tokens < self._min_tokens
        if len(self._stops[0]) and not early and self.matcher.is_accepting():
            np.bitwise_or.at(row, *self._stops)
        barred = self._ends if early else self._eos if self._ignore_eos else None
        if barred is not None:
            words, bits = barred
            others = row.copy()
            np.bitwise_and.at(others, words, ~bits)
            if others.any():
                row[:] = others


def _positions(token_ids: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Words of a mask and the bits of these tokens in them."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    return ids // _BITS, (np.uint32(1) << (ids % _BITS).astype(np.uint32)).view(np.int32)
