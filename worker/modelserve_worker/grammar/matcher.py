"""What may follow in one answer: the state of its grammar after the tokens sampled so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import Executor, Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.mask_time import MaskTime
from modelserve_worker.grammar.unique_keys import UniqueKeys
from modelserve_worker.request import GRAMMAR_FIELD

_BITS = 32

logger = logging.getLogger(__name__)


class GrammarMatcher:
    """A TokenConstraint over a copy of `compiled`, which is this answer's own. What fails in it is told by `error`.

    `eos_token_ids` are the model's, and end an answer that is whole. `stop_token_ids`, the request's own, may then
    follow too. Below `min_tokens` tokens neither may, and with `ignore_eos` the model's may not, while the grammar
    lets anything else follow. `first_mask` is the grammar's, where it is known. Once a mask has been dear, which
    `mask_time` decides, those that follow are computed in `background`.
    `unique_keys`: the answer is a JSON document, and names nothing twice.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        *,
        first_mask: NDArray[np.int32] | None = None,
        dear: bool = False,
        mask_time: MaskTime | None = None,
        background: Executor | None = None,
        unique_keys: UniqueKeys | None = None,
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
        self._proposed = self._words = 0
        self._complete = bool(self.matcher.is_stopped())
        self._error: Exception | None = None
        self._first_mask = first_mask
        self._mask_time = mask_time or MaskTime()
        self._background = background
        self._unique_keys = self._keys_before = unique_keys
        self._computed: Future[NDArray[np.int32]] | None = None  # the next mask, of a dear one
        self.dear = dear

    def ready(self) -> bool:
        if self.dear and self._computed is None and self._first_mask is None and self._background is not None:
            self._computed = self._background.submit(self._compute, np.empty(self._words, dtype=np.int32))
        return self._computed is None or self._computed.done()

    @property
    def complete(self) -> bool:
        """The grammar lets nothing follow."""
        return self._complete and self.error is None

    @property
    def error(self) -> Exception | None:
        """InvalidInput where the grammar exceeded its bounds."""
        return self._error

    def consume(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._first_mask = None
        try:
            matches = self.matcher.consume_token(token_id)
            self._complete = bool(self.matcher.is_stopped())
            self._note_error()
            if self._unique_keys is not None:
                self._unique_keys.push(token_id)
            if not matches and self._error is None:
                self._error = RuntimeError(f"token {token_id} does not match the grammar of the answer")
        except BaseException as error:  # a panic of the library is no Exception
            self._fail(error)

    def propose(self, token_id: int) -> bool:
        """Go on as if the token were sampled, until `roll_back`; False, and nothing has changed, where it cannot be or
        would end the answer."""
        if self._error is not None or token_id in self._end_token_ids or self.matcher.is_stopped():
            return False
        if self.matcher.try_consume_tokens([token_id]) != 1:
            return False
        if self._unique_keys is not None:
            if not self._proposed:
                self._keys_before = self._unique_keys.copy()
            self._unique_keys.push(token_id)
        self._token_ids.append(token_id)
        self._proposed += 1
        return True

    def roll_back(self, count: int) -> None:
        """Take back the last `count` tokens, all that were proposed. What was too complex behind them is no fault of
        the answer."""
        broken = self._error is not None or self.matcher.is_error() or not self.matcher.rollback(count)
        del self._token_ids[len(self._token_ids) - count :]
        self._error, self._proposed = None, 0
        if self._unique_keys is not None:
            self._unique_keys = self._keys_before
        if broken:
            self.matcher = self._compiled.deep_copy()
            self.matcher.consume_tokens(self._token_ids)

    def mask(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that may be sampled, int32 [ceil(vocab / 32)]; any where the grammar cannot be followed, as
        what comes of this step is discarded.
        """
        self._words = len(row)
        computed, self._computed = self._computed, None
        if computed is not None:
            row[:] = computed.result()
        elif self._first_mask is not None:
            row[:], self._first_mask = self._first_mask, None
        else:
            began = time.thread_time()
            self._compute(row)
            self.dear |= self._mask_time.is_dear(time.thread_time() - began)
        try:
            self._note_error()
            if self._unique_keys is not None:
                self._unique_keys.bar(row)
            self._bar_ends(row)
        except BaseException as error:
            self._fail(error)
        if self._error is not None:
            row[:] = -1

    def _compute(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        try:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        except BaseException as error:
            self._fail(error)
        return row

    def _bar_ends(self, row: NDArray[np.int32]) -> None:
        """From what the grammar lets follow to what the request's other fields leave of it."""
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

    def _note_error(self) -> None:
        if self._error is None and self.matcher.is_error():
            reason = self.matcher.get_error().splitlines()[0]
            said = f"exceeds what may be spent on one token: {reason}. Make it less ambiguous or smaller"
            if "NoExtension" in reason:  # the library has no other words for it
                said = "led to a place where nothing can follow. Let each of its alternatives have an end"
            self._error = InvalidInput(f"the answer's grammar {said}", field=GRAMMAR_FIELD)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("a grammar cannot be followed", exc_info=error)
        if self._error is None:
            self._error = RuntimeError(f"the answer's grammar cannot be followed: {type(error).__name__}: {error}")


def is_allowed(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask lets a token follow."""
    return bool(row[token_id // _BITS] >> (token_id % _BITS) & 1)


def _positions(token_ids: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Words of a mask and the bits of these tokens in them."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    return ids // _BITS, (np.uint32(1) << (ids % _BITS).astype(np.uint32)).view(np.int32)
