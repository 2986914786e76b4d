"""The ring of a request: more global pages, for rows of a drafter's window layers (modelserve/sizing/draft_pages.py).

A row's place follows from its position alone, and a page may have rows of two rounds: the newest, and behind them those
of the round before, which are needed no less. So nothing is remembered of what pages hold, but for two figures. Rows
before `_first` are not there: where the request resumed, it found none of them. And of each page that others keep, the
first position whose row would take the place of one that they need: its *fence*. Rows that are written before it lie
behind the end of what is kept. Whoever comes to a fence has another page from there on.

A page that another request keeps computing in, too, is copied when a request resumes there, as one of its window is. Of
pages that are only kept a request reads what is there, and has its own when it writes: where no page is left, those who
keep that one let go of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftPages
from modelserve_worker.scheduling.pages.arena import Page, PageArena

_NEVER = 1 << 62  # a position that no request comes to


class RingRows(NamedTuple):
    """Pages by their entries in a ring, and the first position whose row they have."""

    pages: dict[int, Page]
    first: int


NO_RING_ROWS = RingRows({}, 0)


class KeptRing(Protocol):
    """What of `KeptRows` (page_table.py) lies in a ring."""

    @property
    def position(self) -> int: ...

    @property
    def ring_pages(self) -> Mapping[int, Page]: ...

    @property
    def ring_first(self) -> int: ...


def rows_in(draft: DraftPages, entry: int, first: int, end: int) -> tuple[int, int]:
    """The first of the positions [first, end) that have their place in this entry's page, and the end of the last;
    none where these are equal."""
    size, entries = draft.page_tokens, draft.ring_entries
    oldest, newest = first // size, (end - 1) // size
    oldest += (entry - oldest) % entries
    newest -= (newest - entry) % entries
    begin = max(first, oldest * size)
    return (begin, min(end, (newest + 1) * size)) if begin < end else (end, end)


class DraftRing:
    """Of the request in `slot`, over `arena`. `stride`: `write` is asked before each position that this divides."""

    def __init__(self, arena: PageArena, draft: DraftPages, slot: int, *, stride: int) -> None:
        self._arena = arena
        self._draft = draft
        self._slot = slot
        self._stride = stride
        self._pages: list[Page] = []  # by entry
        self._fences: list[int] = []  # by entry; of a page that nobody keeps it says nothing
        self._first = 0

    @property
    def pages(self) -> Sequence[Page]:
        """By entry."""
        return self._pages

    @property
    def covered_tokens(self) -> int:
        """Most tokens that may be written before `reserve` has something to do."""
        whole = len(self._pages) == self._draft.ring_entries
        return _NEVER if whole else len(self._pages) * self._draft.page_tokens

    def reserve(self, tokens: int) -> None:
        """Hold the pages of a request of `tokens` tokens. Raises OutOfPagesError."""
        if (needed := self._draft.ring_pages(tokens)) > len(self._pages):
            missing = range(len(self._pages), needed)
            self._pages += self._arena.allocate(LayerKind.GLOBAL, self._slot, [self._index(each) for each in missing])
            self._fences += [_NEVER] * len(missing)

    def share(self, kept: KeptRing) -> dict[int, Page]:
        """Hold the pages of a request that resumes there, by entry. Call it first, and `resume` with them then."""
        draft, at = self._draft, kept.position
        self._first = max(kept.ring_first, at - draft.kept_tokens)
        shared = {}
        for logical in range(self._first // draft.page_tokens, -(-at // draft.page_tokens)):
            entry = logical % draft.ring_entries
            if entry not in shared:
                shared[entry] = page = kept.ring_pages[entry]
                self._arena.share(page, self._slot, self._index(entry))
        return shared

    def resume(self, shared: dict[int, Page], tokens: int) -> None:
        """Have pages of its own in place of those that others write to, and all that `tokens` tokens need."""
        arena, slot = self._arena, self._slot
        for entry, page in shared.items():
            if len(page.entries) > 1:
                shared[entry] = arena.own(page, slot, self._index(entry), rows_needed=True)
        missing = [entry for entry in range(self._draft.ring_pages(tokens)) if entry not in shared]
        fresh = arena.allocate(LayerKind.GLOBAL, slot, [self._index(entry) for entry in missing])
        pages = shared | dict(zip(missing, fresh, strict=True))
        self._pages = [pages[entry] for entry in range(len(pages))]
        self._fences = [0] * len(pages)

    def write(self, start: int, end: int, *, least: int | None) -> None:
        """Before a step that computes [start, end), as `PageTable.write`."""
        draft, size = self._draft, self._draft.page_tokens
        lowest = max(start, end - draft.kept_tokens) if least is None else least
        highest = -(-end // self._stride) * self._stride - 1  # of what is written until this is asked again
        needed = max(self._first, (end if least is None else least + 1) - draft.kept_tokens)
        for logical in range(lowest // size, min(highest // size, lowest // size + draft.ring_entries) + 1):
            entry = logical % draft.ring_entries
            if entry >= len(self._pages):
                break  # it is reserved later, and nobody has any of it
            page = self._pages[entry]
            if page.keepers and min(highest, (logical + 1) * size - 1) >= self._fences[entry]:
                index, rows_needed = self._index(entry), self._has_rows(entry, needed, start)
                self._pages[entry] = self._arena.own(page, self._slot, index, rows_needed=rows_needed)
                self._fences[entry] = _NEVER

    def kept_pages(self, end: int) -> RingRows:
        """Pages of the rows before `end` that are there. Whoever keeps them needs these rows."""
        draft = self._draft
        first = max(self._first, end - draft.kept_tokens)
        fence, pages = first + draft.ring_tokens, {}
        for entry, page in enumerate(self._pages):
            if self._has_rows(entry, first, end):
                pages[entry] = page
                self._fences[entry] = min(self._fences[entry], fence) if page.keepers else fence
        return RingRows(pages, first)

    def resend(self) -> None:
        """Put every entry into the arena's next updates."""
        for entry, page in enumerate(self._pages):
            self._arena.resend(page, self._slot, self._index(entry))

    def release(self) -> None:
        """Give every page back."""
        for entry, page in enumerate(self._pages):
            self._arena.drop(page, self._slot, self._index(entry))
        self._pages, self._fences = [], []

    def _index(self, entry: int) -> int:
        return self._draft.first_ring_entry + entry

    def _has_rows(self, entry: int, first: int, end: int) -> bool:
        """Whether some of the positions [first, end) have their place in this page."""
        begin, stop = rows_in(self._draft, entry, first, end)
        return begin < stop
