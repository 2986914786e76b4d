"""Spilled prefixes: an index of copies of the pool's prefixes, and what comes there.

No page is held where they come from: a prefix's may be given up, and moved, at any time. Then what was copied is not
believed. It costs that hit, and no memory.
"""

from __future__ import annotations

from typing import Any

from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.prefix_index import PrefixIndex
from modelserve_worker.scheduling.tiers.copy_lane import Copy, in_memory_order
from modelserve_worker.scheduling.tiers.tier_pool import TierPage, TierPool
from modelserve_worker.scheduling.tiers.transfer import Arrival


class CopyIndex(PrefixIndex[TierPage]):
    """Of copies, in places of `places`, of what `cache` has, or had."""

    def __init__(self, places: TierPool, geometry: CacheGeometry, prices: PromptCost, cache: PrefixCache) -> None:
        super().__init__(places, geometry, prices)
        self._places = places
        self._cache = cache

    def evict(self, prefix: CachedPrefix[TierPage]) -> None:
        super().evict(prefix)
        assert prefix.original is not None, "it was copied from there"
        self._cache.gone(prefix.original)

    def receive(self, source: CachedPrefix[Any]) -> Arrival[TierPage] | None:
        """Copy a prefix of the pool, or of a nearer tier, less the pages that are here."""
        block = self.block_of(source.block.digests())
        shared = next((each for each in block.upwards() if each.uses), None)
        if shared is not None and any(each.page is not None and not each.page.valid for each in shared.upwards()):
            return None  # until whoever copied it has ended
        root = shared or next(each for each in block.upwards() if each.parent is None)
        self.use(root, [])  # so that it stays while room is made
        has_global = bool(self._geometry.global_page.layers)
        blocks = [each for each in source.block.upwards() if each.depth > root.depth] if has_global else []
        pages = [each.page for each in blocks if each.page is not None] + ([source.partial] if source.partial else [])
        pages += source.ring.values()
        sliding = in_memory_order(list(source.sliding.values()))
        if not self._make_room(len(pages), len(sliding)):
            self.stop_using(root)
            return None
        places = dict(zip(sliding, self._places.allocate(LayerKind.SLIDING, len(sliding)), strict=True))
        ordered = in_memory_order(pages)
        places |= zip(ordered, self._places.allocate(LayerKind.GLOBAL, len(ordered)), strict=True)
        by_depth: list[TierPage] = [places[each.page] for each in reversed(blocks) if each.page is not None]
        path = [by_depth[0]] * root.depth + by_depth if by_depth else []  # those before are in use, and not looked at
        self.use(block, path)
        self.stop_using(root)
        for page in by_depth:  # the index has them now
            self._places.let_go(page)
        return Arrival(
            source,
            {logical: places[page] for logical, page in source.sliding.items()},
            places[source.partial] if source.partial else None,
            [Copy(page, place) for page, place in places.items()],
            [],
            block,
            ring={entry: places[page] for entry, page in source.ring.items()},
        )

    def copied(self, copy: Copy) -> None:
        copy.tier_page.copied = True
        copy.tier_page.valid &= not copy.moved

    def is_whole(self, arrival: Arrival[TierPage]) -> bool | None:
        """Others may have copied some of its path."""
        if not arrival.source.live:
            return None
        if not all(copy.ended for copy in arrival.copies):
            return False
        assert arrival.block is not None
        pages = [*arrival.kept, *(block.page for block in arrival.block.upwards() if block.page is not None)]
        return all(page.copied for page in pages) if all(page.valid for page in pages) else None

    def arrive(self, arrival: Arrival[TierPage]) -> CachedPrefix[TierPage]:
        source, block = arrival.source, arrival.block
        assert block is not None
        original = source.original or source
        prefix: CachedPrefix[TierPage] = CachedPrefix(
            block, source.end, source.lowest, source.first, source.tokens, arrival.partial, {**arrival.sliding},
            source.client, None, 0, source.junction, superseded=source.superseded, marks=source.marks,
            original=original, ring={**arrival.ring}, ring_first=source.ring_first,
        )  # fmt: skip
        original.copies[self] = prefix
        self._cache.note(original)
        self.insert(prefix, [])
        return prefix

    def release(self, arrival: Arrival[TierPage], *, arrived: bool) -> None:
        assert arrival.block is not None
        for copy in () if arrived else arrival.copies:
            copy.tier_page.valid = False
        self.stop_using(arrival.block)
        for page in arrival.kept:
            self._places.let_go(page)

    def _base(self, prefix: CachedPrefix[TierPage]) -> int:
        assert prefix.original is not None, "it was copied from there"
        return prefix.original.base

    def _make_room(self, global_pages: int, sliding_pages: int) -> bool:
        needed = {LayerKind.GLOBAL: global_pages, LayerKind.SLIDING: sliding_pages}
        if self._places.fits(needed):
            return True
        if not self._places.could_fit(needed):
            return False
        while (victim := next(self.victims(), None)) is not None:
            self.give_up(victim)
            if self._places.fits(needed):
                return True
        return False
