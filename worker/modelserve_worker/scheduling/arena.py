"""The two-ended page arena: one pool of bytes, sliding pages from the bottom, global pages from the top.

Sliding page s lies at [s * Ps, (s + 1) * Ps), global page g at [total - (g + 1) * Pg, total - g * Pg). Each kind hands
out its lowest free number, so the free bytes gather in the middle and either kind may grow into them. When one kind is
short and the free bytes lie behind the other kind's edge, pages at that edge move into lower free numbers of their own
kind. After all such moves each kind fills exactly 0..held-1, so an allocation succeeds whenever
total - held_s * Ps - held_g * Pg covers it: there are no slabs and nothing is rounded.

Why a move is safe while a step is in flight. Moves travel with the next step and are copied on the device's stream
before that step reads or writes, hence after all earlier steps. An earlier step still in flight reads and writes the
source under its old number; the copy sees what it wrote. The destination, and the bytes that the source leaves, were
free when the move was decided: their last user is an earlier step as well, and whoever is given them next uses them in
this step or later. The moves of one step are copied in the order given, since a later one may start where an earlier
one ended.

Block tables. A held page knows the entry (slot, index) that names it, so a move can be told to the device whoever is in
the step. `take_updates` gives each entry whose page was allocated, moved or put down for sending again since the last
call, with the number it has by then. A page shared by requests would know several entries; nothing else would change.
"""

from __future__ import annotations

import heapq

import numpy as np

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import PageMove, TableUpdates

_NO_ENTRIES = np.empty(0, dtype=np.int32)
_NO_UPDATES = TableUpdates(_NO_ENTRIES, _NO_ENTRIES, _NO_ENTRIES)


class OutOfPagesError(Exception):
    """The pool has fewer free bytes than one page of the kind asked for."""


class Page:
    """A held page, named by entry `index` of the block table of `slot`. Its number may change with any allocation."""

    __slots__ = ("index", "kind", "number", "slot")

    def __init__(self, kind: LayerKind, number: int, slot: int, index: int) -> None:
        self.kind = kind
        self.number = number
        self.slot = slot
        self.index = index


class _End:
    """The pages of one kind. `pages[i]` is the page numbered i, None where free; its length is the kind's edge.

    The last entry is never None. `holes` has each free number below the edge once; numbers that the edge has since
    sunk below may linger in it, but only behind the valid ones, and growth, which happens without holes, clears them.
    """

    def __init__(self, kind: LayerKind, page_bytes: int) -> None:
        self.kind = kind
        self.page_bytes = page_bytes
        self.pages: list[Page | None] = []
        self.holes: list[int] = []
        self.held = 0
        self.changed: dict[Page, None] = {}  # pages whose table entry the device does not have yet, each once

    @property
    def num_holes(self) -> int:
        return len(self.pages) - self.held

    @property
    def edge_bytes(self) -> int:
        return len(self.pages) * self.page_bytes

    def take(self, slot: int, indices: range) -> list[Page]:
        """Hold the lowest free numbers, one for each entry: holes, then numbers past the edge."""
        in_holes = min(self.num_holes, len(indices))
        taken = [Page(self.kind, heapq.heappop(self.holes), slot, index) for index in indices[:in_holes]]
        for page in taken:
            self.pages[page.number] = page
        if beyond := indices[in_holes:]:
            self.holes.clear()
            grown = [Page(self.kind, number, slot, index) for number, index in enumerate(beyond, len(self.pages))]
            self.pages += grown
            taken += grown
        self.held += len(taken)
        self.changed |= dict.fromkeys(taken)
        return taken

    def release(self, page: Page) -> None:
        assert self.pages[page.number] is page, "a page is released once"
        self.held -= 1
        self.changed.pop(page, None)
        self._vacate(page.number)
        page.number = -1  # a stale holder fails at once instead of naming another's page

    def move_edge(self) -> PageMove:
        """Renumber the page at the edge to the lowest hole. Needs a hole."""
        page = self.pages[-1]
        assert page is not None
        move = PageMove(self.kind, page.number, heapq.heappop(self.holes))
        page.number = move.destination
        self.pages[move.destination] = page
        self.changed[page] = None
        self._vacate(move.source)
        return move

    def _vacate(self, number: int) -> None:
        self.pages[number] = None
        if number < len(self.pages) - 1:
            heapq.heappush(self.holes, number)
        while self.pages and self.pages[-1] is None:  # paid for by the growth that raised the edge
            self.pages.pop()


class PageArena:
    """Pages of both kinds in `pool_bytes` bytes per rank. Allocation and release cost O(log pages), amortised.

    Every page has one owner, which gives it back with `release`. `held_bytes` are the bytes of held pages, `moves_made`
    the moves so far; both are read only.
    """

    def __init__(self, geometry: CacheGeometry, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.held_bytes = 0
        self.moves_made = 0
        self._ends = {
            kind: _End(kind, geometry.page(kind).page_bytes) for kind in (LayerKind.SLIDING, LayerKind.GLOBAL)
        }
        self._moves: list[PageMove] = []

    @property
    def free_bytes(self) -> int:
        """Bytes that pages of either kind can still be made of."""
        return self.pool_bytes - self.held_bytes

    def held_pages(self, kind: LayerKind) -> int:
        return self._ends[kind].held

    def allocate(self, kind: LayerKind, slot: int, indices: range) -> list[Page]:
        """Hold a page for each of these entries of the table of `slot`, in their order.

        Succeeds exactly when free_bytes covers the pages; otherwise raises OutOfPagesError, and has changed nothing.
        """
        end = self._ends[kind]
        needed = len(indices) * end.page_bytes
        if needed > self.free_bytes:
            raise OutOfPagesError(
                f"{len(indices)} {kind.value} pages need {needed} bytes; {self.free_bytes} of the pool's "
                f"{self.pool_bytes} are free"
            )
        if (beyond := len(indices) - end.num_holes) > 0:
            self._make_room(end, beyond)
        self.held_bytes += needed
        return end.take(slot, indices)

    def release(self, page: Page) -> None:
        end = self._ends[page.kind]
        end.release(page)
        self.held_bytes -= end.page_bytes

    def resend(self, page: Page) -> None:
        """Put the entry of a held page into the next updates: the device may have lost it."""
        self._ends[page.kind].changed[page] = None

    def take_moves(self) -> tuple[PageMove, ...]:
        """Moves decided since the last call, in order. They must run before any step that uses newer page numbers."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def take_updates(self, kind: LayerKind) -> TableUpdates:
        """Entries of one kind that changed since the last call and whose pages are still held, each once."""
        end = self._ends[kind]
        if not end.changed:
            return _NO_UPDATES
        pages, end.changed = end.changed, {}
        return TableUpdates(
            slots=np.array([page.slot for page in pages], dtype=np.int32),
            indices=np.array([page.index for page in pages], dtype=np.int32),
            pages=np.array([page.number for page in pages], dtype=np.int32),
        )

    def check_integrity(self) -> None:
        """Recount everything from the page lists. Raises AssertionError on the first broken invariant."""
        free = self.pool_bytes
        entries: set[tuple[LayerKind, int, int]] = set()
        for end in self._ends.values():
            held = [page for page in end.pages if page is not None]
            holes = {number for number, page in enumerate(end.pages) if page is None}
            assert all(page.number == number for number, page in enumerate(end.pages) if page), "numbers match places"
            assert len(held) == end.held, f"{end.kind}: {len(held)} pages held, {end.held} counted"
            assert sorted(n for n in end.holes if n < len(end.pages)) == sorted(holes), f"{end.kind}: holes differ"
            assert not end.pages or end.pages[-1] is not None, f"{end.kind}: the edge is free"
            free -= end.edge_bytes
            entries.update((end.kind, page.slot, page.index) for page in held)
        assert free >= 0, f"the two ends overlap by {-free} bytes"
        free += sum(end.num_holes * end.page_bytes for end in self._ends.values())
        assert len(entries) == sum(end.held for end in self._ends.values()), "two pages of one table entry"
        assert free + self.held_bytes == self.pool_bytes, f"{free} free + {self.held_bytes} held bytes"

    def _make_room(self, end: _End, pages: int) -> None:
        """Let `end` grow by so many pages: move the other kind's edge out of the way while it is in it."""
        (other,) = (e for e in self._ends.values() if e is not end)
        while end.edge_bytes + pages * end.page_bytes + other.edge_bytes > self.pool_bytes:
            self._moves.append(other.move_edge())
            self.moves_made += 1
