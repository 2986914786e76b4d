"""Token ids to text while they arrive. Nothing emitted is ever taken back, and no character is ever emitted in part."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from modelserve_worker.text.stop_strings import StopStringFilter
from modelserve_worker.text.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """One sequence's text. Each token costs time in its own length only.

    Bytes that cannot become UTF-8 turn into U+FFFD, one for each maximal malformed part, as in `bytes.decode`; the
    start of a character that may still be completed is held back. Stop strings are searched from token number
    `min_tokens` on.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._filter = StopStringFilter(stop, include_stop=include_stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did; further tokens must not be pushed."""
        return self._filter.matched

    def push(self, token_id: int) -> str:
        """Text that this token made certain; often empty."""
        self._num_tokens += 1
        if self._skip_special_tokens and token_id in self._vocabulary.special_ids:
            return ""
        text = self._utf8.decode(self._vocabulary.bytes_of(token_id))
        return text if self._num_tokens < self._min_tokens else self._filter.push(text)

    def finish(self) -> str:
        """The rest, when the sequence ended for another reason than a stop string."""
        tail = self._utf8.decode(b"", final=True)
        if self._num_tokens < self._min_tokens:
            return tail
        text = self._filter.push(tail)
        return text if self.stop_string is not None else text + self._filter.flush()
