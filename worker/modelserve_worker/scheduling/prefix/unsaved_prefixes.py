"""Cached bytes of the pool that no tier behind it has: they could be given to somebody else only at a loss.

Kept up as prefixes come and go, are superseded and are stored: every admission asks for them, and thousands of prefixes
are too many to look at then. A prefix claims its pages while nobody else has their rows: its own, and those of its
path. A block is claimed once for all prefixes behind it, as it is used once for all (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from modelserve.model.architecture import LayerKind
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix


class UnsavedPrefixes:
    """Prefixes whose rows nobody else has, of pages of `arena`, which knows the bytes that they claim."""

    def __init__(self, arena: PageArena, sizes: dict[LayerKind, int]) -> None:
        """`sizes`: bytes of a page."""
        self._arena = arena
        self._sizes = sizes
        self._prefixes: set[CachedPrefix[Page]] = set()

    def update(self, prefix: CachedPrefix[Page], *, loses_rows: bool) -> None:
        """A prefix, all of whose pages are kept, is live, or what goes with it has changed."""
        if not (prefix.live and loses_rows):
            self.remove(prefix)
        elif prefix not in self._prefixes:
            self._prefixes.add(prefix)
            self._count(prefix, 1, self._arena.claim)

    def remove(self, prefix: CachedPrefix[Page]) -> None:
        """It is about to let go of its pages, or is unsaved no longer."""
        if prefix in self._prefixes:
            self._prefixes.remove(prefix)
            self._count(prefix, -1, self._arena.disclaim)

    def bytes_of(self, prefix: CachedPrefix[Page]) -> int:
        """Cached bytes that only this one claims."""
        return sum(self._sizes[page.kind] for page in self._claimed_alone(prefix) if not page.entries)

    def _count(self, prefix: CachedPrefix[Page], more: int, change: Callable[[Page], None]) -> None:
        for page in prefix.own_pages:
            change(page)
        for block in prefix.block.upwards():
            block.unsaved += more
            if block.unsaved != max(more, 0):
                return  # claimed for another one, as is what is before it
            if block.page is not None:
                change(block.page)

    def _claimed_alone(self, prefix: CachedPrefix[Page]) -> Iterator[Page]:
        yield from (page for page in prefix.own_pages if page.claims == 1)
        for block in prefix.block.upwards():
            if block.unsaved > 1:
                return
            if block.page is not None:
                yield block.page

    def check_integrity(self, unsaved: set[CachedPrefix[Page]]) -> None:
        """Recount. Raises AssertionError."""
        assert unsaved == self._prefixes, "prefixes are unsaved, or are not"
        claimed = {page for prefix in unsaved for page in prefix.own_pages}
        claimed |= {block.page for prefix in unsaved for block in prefix.block.upwards() if block.page is not None}
        counted = sum(self._sizes[page.kind] for page in claimed if not page.entries)
        assert counted == self._arena.claimed_bytes, f"{self._arena.claimed_bytes} bytes are claimed, not {counted}"
