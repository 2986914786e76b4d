"""Positions of a prompt whose rows begin from embeddings and not from tokens, such as an image's. Torch-free.

A *mutual* span is what Gemma 4's larger models make of images ("use_bidirectional_attention": "vision"): in sliding
layers each of its rows sees the whole span, however long, and behind its window what any row sees; global layers stay
causal. So all rows of it are computed in one step, or those behind the ones that a prefix cache has. Rows of other
spans (audio, and images of the models without that word) see what tokens' rows see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """An image that the model embeds when its rows are computed: `values` uint8 [N, V], each row a patch of it, from
    the upper left on, with `columns` patches from left to right."""

    values: NDArray[np.uint8]
    columns: int

    def __len__(self) -> int:
        return len(self.values)

    def positions(self) -> NDArray[np.int64]:
        """Column and row [N, 2] of each patch."""
        numbers = np.arange(len(self))
        return np.stack((numbers % self.columns, numbers // self.columns), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class AudioFrames:
    """A sound that the model embeds when its rows are computed: `values` float32 [F, V], each a frame of it, in order,
    of which it becomes `rows` rows."""

    values: NDArray[np.float32]
    rows: int

    def __len__(self) -> int:
        return self.rows


Embedded = NDArray[np.float32] | ImagePatches | AudioFrames


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """N consecutive positions of a prompt from `start` on. The prompt's tokens there are placeholders, which nothing is
    computed of.

    `embeddings` float32 [N, H] are what the first layer gets: they are not multiplied by sqrt(H); or patches of an
    image or frames of a sound, of which the model makes them. `key`, of KEY_BYTES bytes, stands for them wherever rows
    are looked up: whoever makes a span sees to it that other embeddings have another one. Neighbours that touch are two
    spans and do not see each other.
    """

    start: int
    embeddings: Embedded
    key: bytes
    mutual: bool

    @classmethod
    def of(cls, start: int, embeddings: NDArray[np.float32], *, mutual: bool) -> Self:
        """With a key made of the embeddings themselves: 128 bits of BLAKE2b."""
        digest = hashlib.blake2b(np.ascontiguousarray(embeddings).tobytes(), digest_size=KEY_BYTES)
        return cls(start, embeddings, digest.digest(), mutual)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def end(self) -> int:
        return self.start + len(self)


class SpanRows(NamedTuple):
    """Rows of a step that begin from embeddings, as E parts of spans in the order of the rows; each column int32 [E].

    A part is the rows that one segment has of one span, all of one that is mutual or its last ones.
    """

    segments: Ints  # of the step
    numbers: Ints  # which of its request's spans
    starts: Ints  # position of the first row
    lengths: Ints
    visible: Ints  # the last position that all its rows see in sliding layers; -1: each its own

    @classmethod
    def parts(cls, pieces: Sequence[tuple[int, int, int, int, int]]) -> SpanRows:
        """Of tuples with a word for each column."""
        return cls(*np.array(pieces, dtype=np.int32).reshape(-1, 5).T) if pieces else NO_SPANS

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The parts, each with a word of every column."""
        return zip(*(column.tolist() for column in self), strict=True)

    @property
    def mutual(self) -> bool:
        """Whether any row sees what is behind it."""
        return bool((self.visible >= 0).any())


NO_SPANS = SpanRows(*(np.zeros(0, dtype=np.int32) for _ in range(5)))


def span_pieces(
    spans: Sequence[EmbeddedSpan], segment: int, start: int, end: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """The parts of a request's spans in a segment of positions [start, end)."""
    for number, span in enumerate(spans):
        first, stop = max(start, span.start), min(end, span.end)
        if first < stop:
            yield segment, number, first, stop - first, span.end - 1 if span.mutual else -1
