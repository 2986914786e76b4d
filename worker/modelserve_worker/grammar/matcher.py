"""What may follow in one answer: the state of its grammar after the tokens sampled so far."""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from modelserve.errors import InvalidInput

_BITS = 32
_FIELD = "structured_outputs"  # of a request; the engine does not know which of them its grammar came from

logger = logging.getLogger(__name__)


class GrammarMatcher:
    """A TokenConstraint over `matcher`, which is this answer's own. What fails in it is told by `error`, not raised.

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
        self._complete = bool(matcher.is_stopped())
        self._error: Exception | None = None

    @property
    def complete(self) -> bool:
        """The grammar lets nothing follow."""
        return self._complete and self.error is None

    @property
    def error(self) -> Exception | None:
        """InvalidInput where the grammar exceeded its bounds."""
        return self._error

    def consume(self, token_id: int) -> None:
        self._num_tokens += 1
        try:
            matches = self.matcher.consume_token(token_id)
            self._complete = bool(self.matcher.is_stopped())
            self._note_error()
            if not matches and self._error is None:
                self._error = RuntimeError(f"token {token_id} does not match the grammar of the answer")
        except BaseException as error:  # a panic of the library is no Exception
            self._fail(error)

    def compute(self, row: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that the grammar lets follow, int32 [ceil(vocab / 32)]."""
        try:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        except BaseException as error:
            self._fail(error)

    def adjust(self, row: NDArray[np.int32]) -> None:
        """From the tokens that the grammar lets follow, int32 [ceil(vocab / 32)], to those that may be sampled: any
        where it cannot be followed, as what comes of this step is discarded.
        """
        try:
            self._note_error()
            self._bar_ends(row)
        except BaseException as error:
            self._fail(error)
        if self._error is not None:
            row[:] = -1

    def _bar_ends(self, row: NDArray[np.int32]) -> None:
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

    def _note_error(self) -> None:
        if self._error is None and self.matcher.is_error():
            reason = self.matcher.get_error().splitlines()[0]
            self._error = InvalidInput(
                f"the answer's grammar exceeds what may be spent on one token: {reason}. "
                "Make it less ambiguous or smaller",
                field=_FIELD,
            )

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("a grammar cannot be followed", exc_info=error)
        if self._error is None:
            self._error = RuntimeError(f"the answer's grammar cannot be followed: {type(error).__name__}: {error}")


def _positions(token_ids: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Words of a mask and the bits of these tokens in them."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    return ids // _BITS, (np.uint32(1) << (ids % _BITS).astype(np.uint32)).view(np.int32)
