"""Passes of a step's chunks through global layers, as a staging buffer has them: each takes chunks whose contexts are
expanded together.

There may be as many as chunks, so the section has room for one a request, each over all chunks. It stands last in its
buffer, and of it a step sends the passes that it has, nearly always one: all of them are 200 MB where 4,096 run.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.kernel_buffers import chunk_slots
from modelserve_worker.step.segment_columns import Ints, together
from modelserve_worker.step.staging import StagingBuffer

SECTION = "passes"
Words = TypeVar("Words", Tensor, NDArray[np.int32])
_COLUMNS = 3  # blocks, pages and key_rows of Segments
_ALIGNED = 4  # words, which are 16 bytes


class PassSize(NamedTuple):
    """Programs to launch for a pass."""

    most_blocks: int
    most_pages: int


class ChunkPasses:
    """Of steps of at most `max_num_seqs` chunks."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slots = chunk_slots(max_num_seqs)
        self._stride = max(_ALIGNED, self._slots)
        self.sections = {SECTION: self.words(max_num_seqs)}

    def words(self, passes: int) -> int:
        """Of the first ones."""
        return passes * _COLUMNS * self._stride

    def columns(self, section: Words, number: int) -> list[Words]:
        """Blocks, pages and first key rows of pass `number`, each int32 [chunks]."""
        firsts = range(self.words(number), self.words(number + 1), self._stride)
        return [section[first : first + self._slots] for first in firsts]

    def clear(self, staging: StagingBuffer) -> None:
        """One pass, of no chunk."""
        staging.host(SECTION)[: self.words(1)] = 0
        self.send(staging, 1)

    def send(self, staging: StagingBuffer, passes: int) -> None:
        staging.send(last=SECTION, words=self.words(passes))

    def fill(
        self, staging: StagingBuffer, pages: Ints, blocks: Ints, *, page_tokens: int, capacity: int
    ) -> list[PassSize]:
        """Chunks of so many pages of context and query blocks, in passes of at most `capacity` keys; their sizes."""
        sizes = []
        for number, members in enumerate(together(pages * page_tokens, capacity)):
            of_blocks, of_pages, key_rows = self.columns(staging.host(SECTION), number)
            of_pass = np.zeros(self._slots, dtype=np.int32)
            of_pass[members] = pages[members]
            page_ends = np.cumsum(of_pass)
            of_pages[:] = page_ends
            key_rows[:] = (page_ends - of_pass) * page_tokens
            of_pass[members] = blocks[members]
            of_blocks[:] = np.cumsum(of_pass)
            sizes.append(PassSize(int(blocks[members].sum()), int(pages[members].sum())))
        return sizes
