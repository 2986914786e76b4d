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

Block tables. A page knows the entries (slot, index) that name it, so a move can be told to the device whoever is in the
step. `take_updates` gives each entry that was given a page, or whose page was moved or put down for sending again,
since the last call, with the number it has by then.

Owners. A page is owned by the table entries that name it and by those who keep it without one (the prefix cache). It is
held while an entry names it, cached while it is only kept, and free when nobody owns it. Held, cached and free bytes
add up to the pool, which every `take_moves` asserts. Cached bytes are free bytes that are full: where `allocate` is
short, whoever keeps pages lets go of as many as it takes (`Keeper.reclaim`), so what may be held is what could be held
if nothing were ever kept. A copy of a page travels as a move does, in order with them: a source may be given up, and
even written by the same step, as soon as its copy is in the list.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import NO_UPDATES, PageMove, TableUpdates

_NO_SLOT = -1


class OutOfPagesError(Exception):
    """The pool has fewer free bytes than one page of the kind asked for."""


class Page:
    """A page that somebody owns: entries (slot, index) of block tables of its kind, and `keepers` that need none.

    Its number may change with any allocation. Some of its keepers may claim that its rows are nowhere else. Those that
    are `sound` were looked at, and are finite (page_checks.py).
    """

    __slots__ = ("claims", "entries", "keepers", "kind", "number", "sound")

    def __init__(self, kind: LayerKind, number: int, slot: int, index: int) -> None:
        self.kind = kind
        self.number = number
        self.entries = [(slot, index)]
        self.keepers = 0
        self.claims = 0
        self.sound: tuple[int, int] | None = None


class Keeper(Protocol):
    """A keeper has pages that no table names, and gives them up when the arena, where it is registered, asks for it."""

    def reclaim(self, needed_bytes: int) -> None:
        """Let go of pages until the arena has so many free bytes, or none are left. `allocate` calls it where free
        bytes are short, of one keeper after the other until there are enough."""
        ...

    def forget(self, page: Page) -> None:
        """Let go of this page. A table calls it, by `PageArena.forget`, that is to write over the page and finds no
        memory for another one."""
        ...


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
        self.held = 0  # pages that an entry names
        self.cached = 0  # pages that are only kept
        self.changed: dict[tuple[int, int], Page] = {}  # entries that the device does not have yet, each once

    @property
    def num_holes(self) -> int:
        return len(self.pages) - self.held - self.cached

    @property
    def edge_bytes(self) -> int:
        return len(self.pages) * self.page_bytes

    def take(self, slot: int, indices: Sequence[int]) -> list[Page]:
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
        for index, page in zip(indices, taken, strict=True):
            self.changed[slot, index] = page
        return taken

    def free(self, page: Page) -> None:
        assert self.pages[page.number] is page, "a page is freed once"
        self._vacate(page.number)
        page.number = -1  # a stale holder fails at once instead of naming another's page

    def move_edge(self) -> PageMove:
        """Renumber the page at the edge to the lowest hole. Needs a hole."""
        page = self.pages[-1]
        assert page is not None
        move = PageMove(self.kind, page.number, heapq.heappop(self.holes))
        page.number = move.destination
        self.pages[move.destination] = page
        self.changed |= dict.fromkeys(page.entries, page)
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

    `held_bytes`, `cached_bytes` and `free_bytes` are those of pages by their owners, `claimed_bytes` those of cached
    pages that somebody claims, `moves_made` the pages moved and `copies_made` the pages copied so far; all are read
    only.
    """

    def __init__(self, geometry: CacheGeometry, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.held_bytes = 0
        self.cached_bytes = 0
        self.claimed_bytes = 0
        self.free_bytes = pool_bytes
        self.moves_made = 0
        self.copies_made = 0
        self.renumbered = False  # whether pages have other numbers since the moves before those that were taken last
        self._keepers: list[Keeper] = []
        self._ends = {
            kind: _End(kind, geometry.page(kind).page_bytes) for kind in (LayerKind.SLIDING, LayerKind.GLOBAL)
        }
        self._moves: list[PageMove] = []
        self._renumbered = 0  # `moves_made` when moves were taken last

    @property
    def available_bytes(self) -> int:
        """Bytes that pages of either kind can still be made of: free ones, and those of pages that are only kept."""
        return self.free_bytes + self.cached_bytes

    @property
    def num_keepers(self) -> int:
        """Of all pages; for tests, since it looks at each."""
        return sum(page.keepers for end in self._ends.values() for page in end.pages if page is not None)

    def counts(self) -> dict[str, int]:
        """What `EngineStats` says of pages and bytes; totals of pages are of those held and of room for more."""
        used = {kind: self.held_pages(kind) for kind in LayerKind}
        sizes = {kind: self._ends[kind].page_bytes for kind in LayerKind}
        total = {kind: used[kind] + (self.available_bytes // sizes[kind] if sizes[kind] else 0) for kind in LayerKind}
        return {
            "global_pages_used": used[LayerKind.GLOBAL],
            "global_pages_total": total[LayerKind.GLOBAL],
            "sliding_pages_used": used[LayerKind.SLIDING],
            "sliding_pages_total": total[LayerKind.SLIDING],
            "pool_bytes": self.pool_bytes,
            "held_bytes": self.held_bytes,
            "cached_bytes": self.cached_bytes,
            "page_moves_total": self.moves_made,
            "page_copies_total": self.copies_made,
        }

    def register(self, keeper: Keeper) -> None:
        """Ask `keeper` for its pages when memory is short, after those that registered before."""
        self._keepers.append(keeper)

    def forget(self, page: Page) -> None:
        """Have all keepers let go of the page."""
        for keeper in self._keepers:
            if page.keepers:
                keeper.forget(page)

    def held_pages(self, kind: LayerKind) -> int:
        return self._ends[kind].held

    def allocate(self, kind: LayerKind, slot: int, indices: Sequence[int]) -> list[Page]:
        """Hold a page for each of these entries of the table of `slot`, in their order.

        Succeeds exactly when available_bytes covers the pages; otherwise raises OutOfPagesError, and has changed
        nothing.
        """
        end = self._ends[kind]
        needed = len(indices) * end.page_bytes
        if needed > self.available_bytes:
            raise OutOfPagesError(
                f"{len(indices)} {kind.value} pages need {needed} bytes; {self.available_bytes} of the pool's "
                f"{self.pool_bytes} are free"
            )
        if needed > self.free_bytes:
            self._reclaim(needed)
        assert needed <= self.free_bytes, f"{self.cached_bytes} cached bytes that nobody gives up"
        if (beyond := len(indices) - end.num_holes) > 0:
            self._make_room(end, beyond)
        self.held_bytes += needed
        self.free_bytes -= needed
        return end.take(slot, indices)

    def allocate_kept(self, kind: LayerKind, count: int) -> list[Page]:
        """Keep so many pages that no entry names. Raises OutOfPagesError as `allocate` does."""
        pages = self.allocate(kind, _NO_SLOT, range(count))
        for index, page in enumerate(pages):
            self.keep(page)
            self.drop(page, _NO_SLOT, index)
        return pages

    def share(self, page: Page, slot: int, index: int) -> None:
        """Let one more entry name the page."""
        end = self._ends[page.kind]
        assert end.pages[page.number] is page, "a page that nobody owns cannot be shared"
        if not page.entries:
            end.held, end.cached = end.held + 1, end.cached - 1
            self.held_bytes += end.page_bytes
            self.cached_bytes -= end.page_bytes
            self.claimed_bytes -= end.page_bytes if page.claims else 0
        page.entries.append((slot, index))
        end.changed[slot, index] = page

    def drop(self, page: Page, slot: int, index: int) -> None:
        """The entry names the page no longer. It is free unless others own it."""
        end = self._ends[page.kind]
        assert (slot, index) in page.entries, "an entry gives its page back once"
        page.entries.remove((slot, index))
        if end.changed.get((slot, index)) is page:
            del end.changed[slot, index]
        if page.entries:
            return
        end.held -= 1
        self.held_bytes -= end.page_bytes
        if page.keepers:
            end.cached += 1
            self.cached_bytes += end.page_bytes
            self.claimed_bytes += end.page_bytes if page.claims else 0
        else:
            self._free(end, page)

    def keep(self, page: Page) -> None:
        """Own a page that an entry names, or that another keeps, without an entry."""
        assert page.entries or page.keepers, "a page that nobody owns cannot be kept"
        page.keepers += 1

    def let_go(self, page: Page) -> None:
        """Undo one `keep`. The page is free unless others own it."""
        assert page.keepers > 0, "a keeper gives its page back once"
        page.keepers -= 1
        if page.keepers or page.entries:
            return
        assert not page.claims, "who claims a page keeps it"
        end = self._ends[page.kind]
        end.cached -= 1
        self.cached_bytes -= end.page_bytes
        self._free(end, page)

    def claim(self, page: Page) -> None:
        """Say of a page that one keeps: its rows are nowhere else."""
        page.claims += 1
        if page.claims == 1 and not page.entries:
            self.claimed_bytes += self._ends[page.kind].page_bytes

    def disclaim(self, page: Page) -> None:
        """Undo one `claim`."""
        assert page.claims > 0, "a claim is given up once"
        page.claims -= 1
        if not page.claims and not page.entries:
            self.claimed_bytes -= self._ends[page.kind].page_bytes

    def own(self, page: Page, slot: int, index: int, *, rows_needed: bool) -> Page:
        """A page for this entry, which names `page`, that nobody else has: another one, with the same rows where they
        are needed, or this one where there is no other and nobody else names it."""
        if len(page.entries) == 1 and page.keepers and self.available_bytes < self._ends[page.kind].page_bytes:
            self.forget(page)
        if len(page.entries) == 1 and not page.keepers:
            return page
        (fresh,) = self.allocate(page.kind, slot, [index])
        if rows_needed:
            self.copy(page, fresh)
        self.drop(page, slot, index)
        self.resend(fresh, slot, index)
        return fresh

    def copy(self, source: Page, destination: Page) -> None:
        """Copy a page behind the moves and copies so far, before the next step reads or writes."""
        self._moves.append(PageMove(source.kind, source.number, destination.number))
        self.copies_made += 1

    def resend(self, page: Page, slot: int, index: int) -> None:
        """Put an entry of a held page into the next updates: the device may have lost it."""
        self._ends[page.kind].changed[slot, index] = page

    def take_moves(self) -> tuple[PageMove, ...]:
        """Moves and copies decided since the last call, in order; they must run before any step that uses newer page
        numbers. Asserts that every byte is held, cached or free."""
        owned = sum((end.held + end.cached) * end.page_bytes for end in self._ends.values())
        assert owned == self.held_bytes + self.cached_bytes == self.pool_bytes - self.free_bytes, "bytes were lost"
        moves, self._moves = tuple(self._moves), []
        self.renumbered, self._renumbered = self.moves_made > self._renumbered, self.moves_made
        return moves

    def take_updates(self, kind: LayerKind) -> TableUpdates:
        """Entries of one kind that changed since the last call and whose pages are still held, each once."""
        end = self._ends[kind]
        if not end.changed:
            return NO_UPDATES
        changed, end.changed = end.changed, {}
        entries = np.array(list(changed), dtype=np.int32)
        return TableUpdates(
            slots=np.ascontiguousarray(entries[:, 0]),
            indices=np.ascontiguousarray(entries[:, 1]),
            pages=np.array([page.number for page in changed.values()], dtype=np.int32),
        )

    def check_integrity(self) -> None:
        """Recount everything from the page lists. Raises AssertionError on the first broken invariant."""
        free = self.pool_bytes
        held_bytes = cached_bytes = claimed_bytes = num_entries = 0
        entries: set[tuple[LayerKind, int, int]] = set()
        for end in self._ends.values():
            owned = [page for page in end.pages if page is not None]
            held = [page for page in owned if page.entries]
            holes = {number for number, page in enumerate(end.pages) if page is None}
            assert all(page.number == number for number, page in enumerate(end.pages) if page), "numbers match places"
            assert len(held) == end.held, f"{end.kind}: {len(held)} pages held, {end.held} counted"
            assert len(owned) - len(held) == end.cached, f"{end.kind}: {end.cached} pages cached, by the count"
            assert all(page.entries or page.keepers for page in owned), f"{end.kind}: a page without an owner"
            assert sorted(n for n in end.holes if n < len(end.pages)) == sorted(holes), f"{end.kind}: holes differ"
            assert not end.pages or end.pages[-1] is not None, f"{end.kind}: the edge is free"
            free -= end.edge_bytes
            held_bytes += len(held) * end.page_bytes
            cached_bytes += (len(owned) - len(held)) * end.page_bytes
            claimed_bytes += sum(page.claims > 0 for page in owned if not page.entries) * end.page_bytes
            num_entries += sum(len(page.entries) for page in held)
            entries.update((end.kind, *entry) for page in held for entry in page.entries)
        assert free >= 0, f"the two ends overlap by {-free} bytes"
        free += sum(end.num_holes * end.page_bytes for end in self._ends.values())
        assert len(entries) == num_entries, "two pages of one table entry"
        assert (held_bytes, cached_bytes) == (self.held_bytes, self.cached_bytes), "held or cached bytes differ"
        assert claimed_bytes == self.claimed_bytes, "claimed bytes differ"
        assert free == self.free_bytes, f"{free} free bytes, {self.free_bytes} counted"
        assert free + held_bytes + cached_bytes == self.pool_bytes, f"{free} free + {held_bytes} held bytes"

    def _reclaim(self, needed_bytes: int) -> None:
        for keeper in self._keepers:
            if self.free_bytes < needed_bytes:
                keeper.reclaim(needed_bytes)

    def _free(self, end: _End, page: Page) -> None:
        end.free(page)
        self.free_bytes += end.page_bytes

    def _make_room(self, end: _End, pages: int) -> None:
        """Let `end` grow by so many pages: move the other kind's edge out of the way while it is in it."""
        (other,) = (e for e in self._ends.values() if e is not end)
        while end.edge_bytes + pages * end.page_bytes + other.edge_bytes > self.pool_bytes:
            self._moves.append(other.move_edge())
            self.moves_made += 1
