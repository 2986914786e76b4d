"""The tokens of a request as a chain of hashes, one a global page: equal hashes mean equal tokens from the first on.

A chain begins with whose tokens they are, so that requests which must not read each other's rows never meet. A hash is
128 bits of BLAKE2b over the one before it and the page's tokens: nobody can make two texts meet. Rows that begin from
embeddings are told apart by their spans' keys, which are in the hash of every page that has some of them: their tokens
are placeholders, alike in all images and all sounds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from modelserve_worker.batch import Int32Array
from modelserve_worker.embedded_spans import EmbeddedSpan

_DIGEST_BYTES = 16


class SpanMark(NamedTuple):
    """Of an embedded span: what its rows are, beside their tokens."""

    start: int
    end: int
    key: bytes
    mutual: bool

    @property
    def words(self) -> bytes:
        """Of one length."""
        return struct.pack("<ii?", self.start, self.end, self.mutual) + self.key


class TokenChain:
    """Of `prompt` and what was sampled behind it, in pages of `page_tokens`; `namespace` tells whose they are."""

    def __init__(
        self, namespace: str, prompt: Sequence[int], page_tokens: int, spans: Sequence[EmbeddedSpan] = ()
    ) -> None:
        self._marks = tuple(SpanMark(span.start, span.end, span.key, span.mutual) for span in spans)
        self._page_tokens = page_tokens
        self._tokens: Int32Array = np.asarray(prompt, dtype=np.int32)
        self._digests = [hashlib.blake2b(namespace.encode(), digest_size=_DIGEST_BYTES).digest()]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, known: int, sampled: Sequence[int]) -> None:
        """Make it `known` tokens long with the last of those `sampled`."""
        if missing := known - len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.array(sampled[-missing:], dtype=np.int32)))

    def tokens(self, start: int, end: int) -> Int32Array:
        return self._tokens[start:end]

    def marks(self, start: int, end: int) -> tuple[SpanMark, ...]:
        """Of the spans that have rows of [start, end)."""
        return tuple(mark for mark in self._marks if mark.start < end and start < mark.end) if self._marks else ()

    def digest(self, pages: int) -> bytes:
        """Of the first so many pages, all full."""
        size, digests = self._page_tokens, self._digests
        while len(digests) <= pages:
            start = (len(digests) - 1) * size
            page = self._tokens[start : start + size]
            assert len(page) == size, "a page that is not full has no hash"
            words = digests[-1] + page.tobytes() + b"".join(mark.words for mark in self.marks(start, start + size))
            digests.append(hashlib.blake2b(words, digest_size=_DIGEST_BYTES).digest())
        return digests[pages]
