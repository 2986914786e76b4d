"""The pages of one request: a list for its global layers, a ring for its sliding layers.

A table owns exactly what sizing charges: geometry.global_pages(n) global and geometry.sliding_pages(n) sliding pages
for the `n` tokens reserved so far. Global page i is entry i of the slot's global block table, sliding page i entry i of
its sliding one, and stays there: logical sliding page l lives in entry l mod R (batch.py), so the window moves on by
writing over its own expired rows. Hence a prefill chunk of any length needs no page beyond the window's, and a request
in its window's steady state asks for no sliding page and sends no sliding update.
"""

from __future__ import annotations

import numpy as np

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.arena import Page, PageArena

_ANY_LENGTH = int(np.iinfo(np.int32).max)


class PageTable:
    """Pages of the request in `slot`, over `arena`. Written by the scheduler alone."""

    def __init__(self, arena: PageArena, geometry: CacheGeometry, slot: int) -> None:
        self._arena = arena
        self._geometry = geometry
        self._slot = slot
        self._global: list[Page] = []
        self._sliding: list[Page] = []

    @property
    def held_bytes(self) -> int:
        """Pool bytes per rank."""
        geometry = self._geometry
        return (
            len(self._global) * geometry.global_page.page_bytes + len(self._sliding) * geometry.sliding_page.page_bytes
        )

    @property
    def covered_tokens(self) -> int:
        """Most tokens that `reserve` asks no page for: kinds without layers, and a full ring, cover any length."""
        geometry = self._geometry
        covered = _ANY_LENGTH
        if geometry.global_page.layers:
            covered = len(self._global) * geometry.global_page.page_tokens
        if len(self._sliding) < geometry.sliding_table_entries:
            covered = min(covered, len(self._sliding) * geometry.sliding_page.page_tokens)
        return covered

    def bytes_to_reserve(self, tokens: int) -> int:
        """Pool bytes that `reserve(tokens)` takes from the arena."""
        return max(0, self._geometry.held_bytes(tokens) - self.held_bytes)

    def reserve(self, tokens: int) -> None:
        """Hold the pages of a request of `tokens` tokens. Raises OutOfPagesError if the pool is short."""
        geometry = self._geometry
        for kind, pages, needed in (
            (LayerKind.GLOBAL, self._global, geometry.global_pages(tokens)),
            (LayerKind.SLIDING, self._sliding, geometry.sliding_pages(tokens)),
        ):
            if needed > len(pages):
                pages.extend(self._arena.allocate(kind, self._slot, range(len(pages), needed)))

    def resend(self) -> None:
        """Put every entry into the arena's next updates."""
        for page in (*self._global, *self._sliding):
            self._arena.resend(page)

    def release(self) -> None:
        """Give every page back."""
        for page in (*self._global, *self._sliding):
            self._arena.release(page)
        self._global, self._sliding = [], []
