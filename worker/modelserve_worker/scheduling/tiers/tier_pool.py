"""Which places of a tier are in use: copies of pages, each with a count of keepers.

Used and free bytes add up to the bytes of the pieces that are there, as `check_integrity` recounts. What is left over
at the end of a piece, and in pieces that have pages of the other kind, is free and of no use for now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.host_pages import HostLayout


class TierPage:
    """A copy of a page. `copied` once it has ended; `valid` is false where what was copied is not to be believed."""

    __slots__ = ("copied", "keepers", "kind", "place", "valid")

    def __init__(self, kind: LayerKind, place: int) -> None:
        self.kind = kind
        self.place = place
        self.keepers = 1
        self.copied = False
        self.valid = True

    @property
    def number(self) -> int:
        """As a page of the pool has one: it names the page to whoever copies it."""
        return self.place


class TierPool:
    """Pages in the pieces of `layout` that are there so far."""

    def __init__(self, geometry: CacheGeometry, layout: HostLayout) -> None:
        self.layout = layout
        self.used_bytes = 0
        self._sizes = {kind: geometry.page(kind).page_bytes for kind in LayerKind}
        self._pieces = 0  # that are there
        self._empty: list[int] = []  # a heap of pieces without pages
        self._kinds: list[LayerKind | None] = [None] * layout.num_pieces  # of the pages in each piece
        self._holes: list[list[int]] = [[] for _ in range(layout.num_pieces)]  # free places of pieces that have a kind
        self._open: dict[LayerKind, dict[int, None]] = {kind: {} for kind in LayerKind}  # pieces with holes
        self._num_holes = dict.fromkeys(LayerKind, 0)
        self._taken: dict[tuple[LayerKind, int], TierPage] = {}

    @property
    def capacity_bytes(self) -> int:
        """Of the pieces that are there."""
        return self._pieces * self.layout.piece_bytes

    def grow(self, pieces: int) -> None:
        """So many pieces are there by now."""
        for piece in range(self._pieces, min(pieces, self.layout.num_pieces)):
            heapq.heappush(self._empty, piece)
            self._pieces = piece + 1

    def fits(self, needed: Mapping[LayerKind, int]) -> bool:
        """Whether so many pages of each kind can be had now."""
        return self._pieces_for(needed, self._num_holes) <= len(self._empty)

    def could_fit(self, needed: Mapping[LayerKind, int]) -> bool:
        """Whether they could be had if there were nothing else."""
        return self._pieces_for(needed, dict.fromkeys(LayerKind, 0)) <= self._pieces

    def allocate(self, kind: LayerKind, count: int) -> list[TierPage]:
        """Pages in rising places, each kept once; there is room for them."""
        taken = [self._take(kind) for _ in range(count)]
        return sorted(taken, key=lambda page: page.place)

    def keep(self, page: TierPage) -> None:
        """Keep a page that is kept already."""
        assert page.keepers > 0, "a page that nobody has cannot be kept"
        page.keepers += 1

    def let_go(self, page: TierPage) -> None:
        """Undo one keep; the place is free when nobody keeps the page."""
        assert page.keepers > 0, "a keeper gives its page back once"
        page.keepers -= 1
        if page.keepers:
            return
        kind, per_piece = page.kind, self.layout.per_piece[page.kind]
        piece, _ = self.layout.locate(kind, page.place)
        del self._taken[kind, page.place]
        self.used_bytes -= self._sizes[kind]
        holes = self._holes[piece]
        if len(holes) + 1 < per_piece:
            heapq.heappush(holes, page.place)
            self._open[kind][piece] = None
            self._num_holes[kind] += 1
            return
        self._num_holes[kind] -= len(holes)
        self._open[kind].pop(piece, None)
        self._kinds[piece], self._holes[piece] = None, []
        heapq.heappush(self._empty, piece)

    def lose(self, places: Iterable[tuple[LayerKind, int]]) -> None:
        """What these places have is not to be believed."""
        for each in places:
            if page := self._taken.get(each):
                page.valid = False

    def check_integrity(self, kept: Iterable[tuple[TierPage, int]]) -> None:
        """Recount: `kept` are the pages with all their keepers. Raises AssertionError."""
        counts = dict(kept)
        assert all(page.keepers == count for page, count in counts.items()), "keepers of a tier's pages differ"
        assert set(counts) == set(self._taken.values()), "a tier's pages are lost"
        used = sum(self._sizes[kind] for kind, _ in self._taken)
        free = self.capacity_bytes - used
        assert used == self.used_bytes, f"{used} bytes of a tier are used, {self.used_bytes} counted"
        assert free >= 0, f"{-free} bytes of a tier too many are used"
        for piece in range(self._pieces):
            inside = [kind for kind, place in self._taken if self.layout.locate(kind, place)[0] == piece]
            assert set(inside) == ({self._kinds[piece]} if self._kinds[piece] else set())
            assert (piece in self._empty) == (not inside), f"piece {piece} is empty or is not"
            assert not inside or len(inside) + len(self._holes[piece]) == self.layout.per_piece[inside[0]]

    def _pieces_for(self, needed: Mapping[LayerKind, int], holes: Mapping[LayerKind, int]) -> int:
        """Empty pieces that pages take which find no hole."""
        beyond = {kind: count - holes[kind] for kind, count in needed.items() if count > holes[kind]}
        return sum(-(-count // self.layout.per_piece[kind]) for kind, count in beyond.items())

    def _take(self, kind: LayerKind) -> TierPage:
        if not self._open[kind]:
            piece, per_piece = heapq.heappop(self._empty), self.layout.per_piece[kind]
            self._kinds[piece] = kind
            self._holes[piece] = list(range(piece * per_piece, (piece + 1) * per_piece))
            self._open[kind][piece] = None
            self._num_holes[kind] += per_piece
        piece = next(iter(self._open[kind]))
        place = heapq.heappop(self._holes[piece])
        self._num_holes[kind] -= 1
        if not self._holes[piece]:
            del self._open[kind][piece]
        self.used_bytes += self._sizes[kind]
        page = self._taken[kind, place] = TierPage(kind, place)
        return page
