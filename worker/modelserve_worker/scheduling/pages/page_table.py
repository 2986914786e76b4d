"""The pages of one request: a list for its global layers, a ring for its sliding layers.

A table owns exactly what sizing charges: geometry.global_pages(n) global and geometry.sliding_pages(n) sliding pages
for the `n` tokens reserved so far. Global page i is entry i of the slot's global block table, sliding page i entry i of
its sliding one: logical sliding page l lives in entry l mod R (batch.py), so the window moves on by writing over its
own expired rows. Hence a prefill chunk of any length needs no page beyond the window's, and a request in its window's
steady state asks for no sliding page and sends no sliding update.

With a prefix cache others may own these pages as well, and whoever writes makes sure that nobody else needs the rows
that are written over:

- Full global pages are never written again, so any number of tables may name one.
- A table that resumes inside a page (`resume`) has a copy of it. Behind that, rows are only appended: whoever keeps a
  page needs the rows it had by then.
- A sliding page belongs to one table at most. Before a step writes a new logical page into an entry whose page is kept,
  the entry gets another page (`write`), and a copy where the step still reads the old rows.
- Pages that have left the window are kept as far back as a resume point may reach (`_history`), while memory lasts.

None of it takes bytes that are promised: where no page is left, those who keep the page in question let go of it, and
the table goes on in its place.

Rows of a drafter's window layers are in a ring of their own (draft_ring.py), of global pages behind the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import numpy as np

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import spare_from, stored_from
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.pages.draft_ring import NO_RING_ROWS, DraftRing, RingRows

_ANY_LENGTH = int(np.iinfo(np.int32).max)
_NO_PAGE = -1


class KeptRows(Protocol):
    """Rows of earlier requests at which another may resume."""

    @property
    def position(self) -> int:
        """Rows [0, position) are there."""
        ...

    @property
    def global_pages(self) -> list[Page]:
        """Of these rows."""
        ...

    @property
    def sliding_pages(self) -> Mapping[int, Page]:
        """By logical number: those of the window before `position`, and older ones without a gap."""
        ...

    @property
    def ring_pages(self) -> Mapping[int, Page]:
        """By entry: those of a drafter's rows."""
        ...

    @property
    def ring_first(self) -> int:
        """The first position whose row they have: that of the window before `position`, or an older one."""
        ...


class PageTable:
    """Pages of the request in `slot`, over `arena`. Written by the scheduler alone.

    `keeping`: pages are handed to a prefix cache (`kept_pages`), so that writes tell (`write`).
    """

    def __init__(self, arena: PageArena, geometry: CacheGeometry, slot: int, *, keeping: bool = False) -> None:
        self._arena = arena
        self._geometry = geometry
        self._slot = slot
        self._ring: DraftRing | None = None
        if geometry.draft is not None and geometry.draft.ring_entries:
            self._ring = DraftRing(arena, geometry.draft, slot, stride=geometry.sliding_page.page_tokens)
        self._keeping = keeping and (bool(geometry.sliding_page.layers) or self._ring is not None)
        self._global: list[Page] = []
        self._sliding: list[Page] = []
        self._logical: list[int] = []  # which logical page each sliding page holds, all its rows so far; or _NO_PAGE
        self._history: dict[int, Page] = {}  # kept logical pages that have left the window, rising
        self._spare: list[tuple[Page, int, int]] = []  # pages of a spare slot, with their entries, until they are sent
        self._end = 0  # rows [0, end) are computed by the steps scheduled so far

    @property
    def held_bytes(self) -> int:
        """Pool bytes per rank, those of shared pages included."""
        geometry, ring = self._geometry, 0 if self._ring is None else len(self._ring.pages)
        held = (len(self._global) + ring) * geometry.global_page.page_bytes
        return held + len(self._sliding) * geometry.sliding_page.page_bytes

    @property
    def covered_tokens(self) -> int:
        """Most tokens that may be written before `reserve` and `write` have something to do: kinds without layers, and
        a full ring that nobody else has pages of, cover any length."""
        geometry = self._geometry
        covered = _ANY_LENGTH
        if geometry.global_page.layers:
            covered = len(self._global) * geometry.global_page.page_tokens
        if len(self._sliding) < geometry.sliding_table_entries:
            covered = min(covered, len(self._sliding) * geometry.sliding_page.page_tokens)
        if self._ring is not None:
            covered = min(covered, self._ring.covered_tokens)
        if self._keeping:
            covered = min(covered, geometry.sliding_page.pages(self._end) * geometry.sliding_page.page_tokens)
        return covered

    @property
    def pages(self) -> Iterable[Page]:
        """Those that its entries name."""
        return (*self._global, *self._sliding, *(() if self._ring is None else self._ring.pages))

    @property
    def history(self) -> Collection[Page]:
        """Pages that it keeps behind its window."""
        return self._history.values()

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
        self._logical += [_NO_PAGE] * (len(self._sliding) - len(self._logical))
        if self._ring is not None:
            self._ring.reserve(tokens)

    def resume(self, kept: KeptRows, tokens: int) -> None:
        """Hold the pages of a request of `tokens` tokens whose rows before `kept.position` exist. Call it first."""
        geometry, at = self._geometry, kept.position
        for index, page in enumerate(kept.global_pages):
            self._arena.share(page, self._slot, index)
        self._global = list(kept.global_pages)
        window: dict[int, Page] = {}
        if geometry.sliding_page.layers:
            size = geometry.sliding_page.page_tokens
            first = max(0, at - geometry.window + 1) // size
            for logical in range(first, geometry.sliding_page.pages(at)):
                window[logical] = page = kept.sliding_pages[logical]
                self._arena.share(page, self._slot, logical % geometry.sliding_table_entries)
            for logical in range(spare_from(geometry, at) // size, first):
                if logical in kept.sliding_pages:
                    self._keep(logical, kept.sliding_pages[logical])
        ring = {} if self._ring is None else self._ring.share(kept)
        # All are held by now, so none of them is given up for the copies.
        if at % geometry.global_page.page_tokens and self._global:
            self._global[-1] = self._own(self._global[-1], len(self._global) - 1, rows_needed=True)
        for logical, page in window.items():
            if len(page.entries) > 1 or (logical + 1) * geometry.sliding_page.page_tokens > at:
                window[logical] = self._own(page, logical % geometry.sliding_table_entries, rows_needed=True)
        entries = {logical % geometry.sliding_table_entries: logical for logical in window}
        missing = [i for i in range(geometry.sliding_pages(tokens)) if i not in entries]
        fresh = dict(zip(missing, self._arena.allocate(LayerKind.SLIDING, self._slot, missing), strict=True))
        self._logical = [entries.get(i, _NO_PAGE) for i in range(len(entries) + len(missing))]
        self._sliding = [fresh[i] if i in fresh else window[entries[i]] for i in range(len(self._logical))]
        self._end = at
        if self._ring is not None:
            self._ring.resume(ring, tokens)
        self.reserve(tokens)

    def write(self, start: int, end: int, spare_slot: int | None = None, *, least: int | None = None) -> bool:
        """Before a step that computes [start, end), whose pages are reserved: whoever else has pages that it would
        write over keeps them. `spare_slot` is one that nobody holds; True when the step is to store rows through it.

        `least`, of a decode: where it begins if no draft in flight is accepted. What is read from there, and what a
        request may resume with that ends there, is kept whatever is accepted."""
        if not self._keeping:
            return False
        geometry, self._end = self._geometry, end
        if self._ring is not None:
            self._ring.write(start, end, least=least)
        if not geometry.sliding_page.layers:
            return False
        size, entries = geometry.sliding_page.page_tokens, geometry.sliding_table_entries
        stored, oldest_end = stored_from(geometry, end), end if least is None else least + 1
        begun, surely = start // size, start if least is None else least
        # Rows that a step in flight may yet write have left a window as short as the drafts of two steps.
        past = stored if least is None else min(stored, least)
        used = self._remember(start, spare_from(geometry, oldest_end), past, spare_slot)
        if start % size and stored > start and least is None:
            self._logical[begun % entries] = _NO_PAGE  # it will never hold its last rows
        for logical in range(max(start, stored) // size, geometry.sliding_page.pages(end)):
            entry = logical % entries
            if self._logical[entry] == logical:
                continue  # its rows are appended to
            page = self._sliding[entry]
            if page.keepers:
                last = (surely - 1) // size  # of the pages with rows of earlier steps
                newest = last - (last - entry) % entries  # of those, in this entry
                read = surely > 0 <= newest and (newest + 1) * size > surely - geometry.window + 1
                self._sliding[entry] = self._own(page, entry, rows_needed=read)
            self._logical[entry] = logical
        return used

    def sent(self) -> None:
        """The step's updates have been taken: pages of a spare slot need their entries no longer."""
        for page, slot, index in self._spare:
            self._arena.drop(page, slot, index)
        self._spare = []

    def kept_pages(self, end: int) -> tuple[list[Page], dict[int, Page], RingRows]:
        """Pages of the rows [0, end), which steps scheduled so far compute: global ones, and by their logical number
        those sliding ones that reach back from `end` without a gap, as far as a request may resume before it: how far
        the steps reached that left older ones is not said by them. And those of a drafter's rows, none without one."""
        size = self._geometry.sliding_page.page_tokens
        pages: dict[int, Page] = {}
        newest = (end - 1) // size if self._geometry.sliding_page.layers else -1
        for logical in range(newest, spare_from(self._geometry, end) // size - 1, -1):
            entry = logical % self._geometry.sliding_table_entries
            page = self._sliding[entry] if self._logical[entry] == logical else self._history.get(logical)
            if page is None:
                break
            pages[logical] = page
        ring = NO_RING_ROWS if self._ring is None else self._ring.kept_pages(end)
        return self._global[: self._geometry.global_pages(end)], pages, ring

    def forget(self, page: Page | None = None) -> None:
        """Let go of the page, or of all pages, that have left the window."""
        for logical, each in list(self._history.items()):
            if page is None or page is each:
                del self._history[logical]
                self._arena.let_go(each)

    def resend(self) -> None:
        """Put every entry into the arena's next updates."""
        for pages in (self._global, self._sliding):
            for index, page in enumerate(pages):
                self._arena.resend(page, self._slot, index)
        if self._ring is not None:
            self._ring.resend()

    def release(self) -> None:
        """Give every page back."""
        self.sent()
        for pages in (self._global, self._sliding):
            for index, page in enumerate(pages):
                self._arena.drop(page, self._slot, index)
        self._global, self._sliding, self._logical = [], [], []
        if self._ring is not None:
            self._ring.release()
        self.forget()

    def _own(self, page: Page, index: int, *, rows_needed: bool) -> Page:
        return self._arena.own(page, self._slot, index, rows_needed=rows_needed)

    def _remember(self, start: int, first: int, stored: int, spare_slot: int | None) -> bool:
        """Keep the pages of the rows [first, stored), which end up outside the window that the step leaves in the ring.

        Those that it computes are stored through the spare slot; True when it does.
        """
        arena, size = self._arena, self._geometry.sliding_page.page_tokens
        entries = self._geometry.sliding_table_entries
        for logical in [logical for logical in self._history if logical * size < first]:
            arena.let_go(self._history.pop(logical))
        computed = range(max(first, start // size * size) // size, stored // size)  # pages with rows of this step
        for logical in range(first // size, min(computed.start, stored // size)):
            if logical not in self._history and self._logical[logical % entries] == logical:
                self._keep(logical, self._sliding[logical % entries])
        room = arena.available_bytes // self._geometry.sliding_page.page_bytes
        if spare_slot is None or not computed or len(computed) > room:
            return False
        for logical in computed:
            index = logical % entries
            (page,) = arena.allocate(LayerKind.SLIDING, spare_slot, [index])
            if logical * size < start:
                arena.copy(self._sliding[index], page)
            self._spare.append((page, spare_slot, index))
            self._keep(logical, page)
        return True

    def _keep(self, logical: int, page: Page) -> None:
        self._arena.keep(page)
        self._history[logical] = page
