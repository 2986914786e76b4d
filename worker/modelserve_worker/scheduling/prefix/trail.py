"""What a running request has to do with cached prefixes: where it resumed, and what it has left to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.pages.draft_ring import rows_in
from modelserve_worker.scheduling.pages.page_checks import CheckedRows
from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix, Hit


@dataclass(slots=True, eq=False)
class Trail:
    """Of a request that begins with its first token, unless it resumes."""

    checkpoints: list[int] = field(default_factory=list)  # positions where a chunk is to end, rising
    parted: int = 0  # where it resumed, if more than one history goes on from there
    prefix: CachedPrefix[Page] | None = None  # the last one on its path that a prefix cache has
    joined: int = 0  # the last position that its tokens have in common with that one
    left: list[CachedPrefix[Page]] = field(default_factory=list)  # that nobody had left before
    _hit: Hit[Page] | None = None
    _sliding: Mapping[int, Page] = field(default_factory=dict)  # of the hit, which loses them when its prefix goes
    _ring: Mapping[int, Page] = field(default_factory=dict)  # likewise

    def resume(self, hit: Hit[Page]) -> None:
        """It begins there, and is counted among those who follow the prefix."""
        self.prefix, self.joined = hit.prefix, hit.position
        self._hit, self._sliding, self._ring = hit, hit.sliding_pages, hit.ring_pages
        if hit.position < hit.prefix.end and hit.prefix.followers > 1:
            self.parted = hit.position

    def read(self, geometry: CacheGeometry) -> dict[Page, CheckedRows]:
        """Pages of others that it began behind, and which of their rows it found there."""
        if self._hit is None:
            return {}
        at, size = self._hit.position, geometry.global_page.page_tokens
        pages = enumerate(self._hit.global_pages)
        rows = {page: CheckedRows(0, min(size, at - index * size)) for index, page in pages}
        size = geometry.sliding_page.page_tokens
        first = max(0, at - geometry.window + 1) // size if geometry.sliding_page.layers else 0
        rows |= {
            page: CheckedRows(0, min(size, at - logical * size))
            for logical, page in self._sliding.items()
            if first <= logical and logical * size < at
        }
        if (draft := geometry.draft) is not None:
            begun = max(self._hit.ring_first, at - draft.kept_tokens)
            for entry, page in self._ring.items():
                first, end = rows_in(draft, entry, begun, at)
                if first < end:
                    rows[page] = CheckedRows(first, end, draft.page_tokens)
        return rows
