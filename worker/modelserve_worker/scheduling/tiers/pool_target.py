"""Restored prefixes: what is copied from a tier behind the pool comes into pages of the pool.

The pages are cached ones that nobody reads yet: free bytes that are being filled. Where running requests need them all
the same, they are given up as the last of all.
"""

from __future__ import annotations

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.pages.arena import Page, PageArena
from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.tiers.copy_lane import Copy, in_memory_order
from modelserve_worker.scheduling.tiers.tier_pool import TierPage
from modelserve_worker.scheduling.tiers.transfer import Arrival, Target


class PoolTarget(Target[Page]):
    """Prefixes come into `cache`, whose pages are those of `arena`."""

    def __init__(self, arena: PageArena, cache: PrefixCache, geometry: CacheGeometry) -> None:
        self._arena = arena
        self._cache = cache
        self._geometry = geometry

    def receive(self, source: CachedPrefix[TierPage]) -> Arrival[Page] | None:
        blocks = list(source.block.upwards())[-2::-1] if self._geometry.global_page.layers else []
        there = self._cache.pages_of(block.digest for block in blocks)
        missing = [block.page for block in blocks[len(there) :] if block.page is not None]
        kinds = (
            (LayerKind.SLIDING, list(source.sliding.values())),
            (LayerKind.GLOBAL, [*missing, *source.ring.values(), *([source.partial] if source.partial else [])]),
        )
        needed = sum(len(copied) * self._geometry.page(kind).page_bytes for kind, copied in kinds)
        cached = sum(self._geometry.page(page.kind).page_bytes for page in there if not page.entries)
        if needed + cached > self._arena.available_bytes:
            return None
        for page in there:
            self._arena.keep(page)
        fresh: dict[TierPage, Page] = {}
        for kind, copied in kinds:
            pages = in_memory_order(self._arena.allocate_kept(kind, len(copied)))
            fresh |= zip(sorted(copied, key=lambda page: page.place), pages, strict=True)
        return Arrival(
            source,
            {logical: fresh[page] for logical, page in source.sliding.items()},
            fresh[source.partial] if source.partial else None,
            [Copy(page, copied) for copied, page in fresh.items()],
            [*there, *(fresh[page] for page in missing)],
            ring={entry: fresh[page] for entry, page in source.ring.items()},
        )

    def copied(self, copy: Copy) -> None:
        """The page is sound, or was given up."""

    def arrive(self, arrival: Arrival[Page]) -> CachedPrefix[Page]:
        """There may be the same prefix by now; either takes the place of the one that was copied, if that is gone."""
        source = arrival.source
        block = self._cache.block_of(source.block.digests())
        behind = source.tokens[block.depth * self._cache.page_tokens - source.first :]
        same = block.prefixes.ending(behind, source.marks)
        prefix = next((each for each in same if each.lowest <= source.lowest), None)
        if prefix is None:
            prefix = CachedPrefix(
                block, source.end, source.lowest, source.first, source.tokens, arrival.partial, dict(arrival.sliding),
                source.client, None, 0, source.junction, superseded=source.superseded, marks=source.marks,
                ring=dict(arrival.ring), ring_first=source.ring_first,
            )  # fmt: skip
            self._cache.insert(prefix, arrival.path)
        if source.live and source.original is not None and not source.original.live:
            self._cache.stand_in(prefix, source)
        return prefix

    def release(self, arrival: Arrival[Page], *, arrived: bool) -> None:  # noqa: ARG002 - the pool's pages are free
        for page in arrival.kept:
            self._arena.let_go(page)
