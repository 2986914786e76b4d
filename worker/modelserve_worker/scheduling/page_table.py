"""The pages of one request: a list for its global layers, a sliding list for its sliding layers.

A table owns exactly what sizing charges: geometry.global_pages(n) global and geometry.sliding_pages(n) sliding pages
for the `n` tokens reserved so far. The sliding pages are mapped to the logical pages of the window as it moves; those
that the window has left stay with the request and are mapped again. Hence a prefill chunk of any length needs no page
beyond the window's, and a request in its window's steady state never asks the arena for a sliding page.
"""

from __future__ import annotations

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import SlidingTable
from modelserve_worker.scheduling.arena import Page, PageArena


class PageTable:
    """Pages of one request, over `arena`. Written by the scheduler alone."""

    def __init__(self, arena: PageArena, geometry: CacheGeometry) -> None:
        self._arena = arena
        self._geometry = geometry
        self._global: list[Page] = []
        self._window: list[Page] = []  # logical sliding pages _first, _first + 1, ...
        self._first = 0
        self._spare: list[Page] = []  # sliding pages held and not mapped
        self._global_numbers: tuple[int, ...] = ()
        self._numbered_at = (0, 0)  # (pages, moves made) that _global_numbers was read at

    @property
    def held_bytes(self) -> int:
        """Pool bytes per rank."""
        sliding = len(self._window) + len(self._spare)
        return len(self._global) * self._geometry.global_page.page_bytes + (
            sliding * self._geometry.sliding_page.page_bytes
        )

    def bytes_to_reserve(self, tokens: int) -> int:
        """Pool bytes that `reserve(tokens)` takes from the arena."""
        return max(0, self._geometry.held_bytes(tokens) - self.held_bytes)

    def reserve(self, tokens: int) -> None:
        """Hold the pages of a request of `tokens` tokens. Raises OutOfPagesError if the pool is short."""
        while len(self._global) < self._geometry.global_pages(tokens):
            self._global.append(self._arena.allocate(LayerKind.GLOBAL))
        while len(self._window) + len(self._spare) < self._geometry.sliding_pages(tokens):
            self._spare.append(self._arena.allocate(LayerKind.SLIDING))

    def release(self) -> None:
        """Give every page back."""
        for page in (*self._global, *self._window, *self._spare):
            self._arena.release(page)
        self._global, self._window, self._spare = [], [], []

    def global_numbers(self, end: int) -> tuple[int, ...]:
        """Numbers of the global pages that cover [0, end)."""
        version = (len(self._global), self._arena.moves_made)
        if version != self._numbered_at:
            self._global_numbers = tuple(page.number for page in self._global)
            self._numbered_at = version
        return self._global_numbers[: self._geometry.global_pages(end)]

    def advance(self, end: int) -> tuple[SlidingTable, SlidingTable]:
        """Slide the window to the last W - 1 positions below `end`: the read table before, and the write table after.

        What the step before wrote is what this one reads: both are [max(0, start - W + 1), start). A page of the read
        table that the window leaves may come back in the write table under a new logical page; batch.py says why that
        is safe. Needs `reserve(end)` first: |pages of either window| <= sliding_pages(end), so the spare pages suffice.
        """
        read = self._sliding_table()
        spec = self._geometry.sliding_page
        oldest = max(0, end - self._geometry.window + 1)
        if not spec.layers or oldest >= end:
            return read, read
        first, last = oldest // spec.page_tokens, (end - 1) // spec.page_tokens
        if (first, last) == (self._first, self._first + len(self._window) - 1):
            return read, read
        left = max(0, min(first - self._first, len(self._window)))
        self._spare += self._window[:left]
        self._window = self._window[left:]
        self._first = first
        while len(self._window) < last - first + 1:
            self._window.append(self._spare.pop())
        return read, self._sliding_table()

    def _sliding_table(self) -> SlidingTable:
        return SlidingTable(self._first, tuple(page.number for page in self._window))
