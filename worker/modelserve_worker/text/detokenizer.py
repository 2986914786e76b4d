"""Turns token ids into text while they arrive. Nothing emitted is taken back, no character is emitted in part."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from modelserve_worker.text.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """One sequence's text. Each token costs time in its own length only.

    Bytes that cannot become UTF-8 turn into U+FFFD, one for each maximal malformed part, as in `bytes.decode`; the
    start of a character that may still be completed is held back.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._held = b""  # the start of a character

    def push(self, token_id: int) -> str:
        """Text that this token made certain; often empty."""
        if self._skip_special_tokens and token_id in self._vocabulary.special_ids:
            return ""
        data = self._held + self._vocabulary.bytes_of(token_id)
        text, num_read = utf_8_decode(data, "replace")
        self._held = data[num_read:]
        return text

    def finish(self) -> str:
        """U+FFFD for a character that stays incomplete. Tokens that follow begin a new text."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")


def decode(token_ids: Iterable[int], vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> str:
    """The text of tokens that are all there."""
    detokenizer = IncrementalDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])
