"""Tails on their way from the pool to host memory.

No page is held for a store: its pages are the tail's, which may be given up, and moved, at any time. Then what was
copied is not believed. It costs that hit, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.prefix.tail_index import TailIndex
from modelserve_worker.scheduling.prefix.tails import Block, Tail
from modelserve_worker.scheduling.tiers.host_copies import Copy, CopyLane, in_memory_order
from modelserve_worker.scheduling.tiers.host_pool import HostPage, HostPool


@dataclass(eq=False, slots=True)
class _Store:
    tail: Tail[Any]
    block: Block[HostPage]  # in use
    sliding: dict[int, HostPage]  # these and `partial` are kept
    partial: HostPage | None
    copies: list[Copy]
    bytes: int

    @property
    def own(self) -> list[HostPage]:
        return [*self.sliding.values(), *([self.partial] if self.partial else [])]

    @property
    def pages(self) -> list[HostPage]:
        """Those of its way, too, some of which others may have stored."""
        return [*self.own, *(block.page for block in self.block.upwards() if block.page is not None)]


class HostStores:
    """Into `index`, whose pages are those of `pool`."""

    def __init__(
        self, pool: HostPool, index: TailIndex[HostPage], geometry: CacheGeometry, saved: Callable[[Tail[Page]], None]
    ) -> None:
        """`saved` hears of a tail that is in host memory."""
        self.lane = CopyLane(pool)
        self._pool = pool
        self._index = index
        self._saved = saved
        self._has_global = bool(geometry.global_page.layers)
        self._stores: dict[Tail[Any], _Store] = {}
        self._sizes = {kind: geometry.page(kind).page_bytes for kind in LayerKind}
        self.stored_bytes = 0
        self.coming_bytes = 0  # that are being copied

    def __contains__(self, tail: Tail[Any]) -> bool:
        return tail in self._stores

    def __bool__(self) -> bool:
        return bool(self._stores)

    def start(self, tail: Tail[Any]) -> bool:
        """Queue the copies of a live tail of the pool, or of a nearer tier, less the pages that this one has. False
        where there is no room."""
        block = self._index.block_of(tail.block.digests())
        shared = next((each for each in block.upwards() if each.uses), None)
        if shared is not None and any(each.page is not None and not each.page.valid for each in shared.upwards()):
            return False  # until whoever copied it has ended
        root = shared or next(each for each in block.upwards() if each.parent is None)
        self._index.use(root, [])  # so that it stays while room is made
        ways = [each for each in tail.block.upwards() if each.depth > root.depth] if self._has_global else []
        pages = [each.page for each in ways if each.page is not None] + ([tail.partial] if tail.partial else [])
        sliding = in_memory_order(list(tail.sliding.values()))
        if not self._make_room(len(pages), len(sliding)):
            self._index.stop_using(root)
            return False
        places = dict(zip(sliding, self._pool.allocate(LayerKind.SLIDING, len(sliding)), strict=True))
        ordered = in_memory_order(pages)
        places |= zip(ordered, self._pool.allocate(LayerKind.GLOBAL, len(ordered)), strict=True)
        by_depth: list[HostPage] = [places[each.page] for each in reversed(ways) if each.page is not None]
        way = [by_depth[0]] * root.depth + by_depth if by_depth else []  # those before are in use, and not looked at
        self._index.use(block, way)
        self._index.stop_using(root)
        for page in by_depth:  # the index has them now
            self._pool.let_go(page)
        copies = [Copy(page, place) for page, place in places.items()]
        store = _Store(
            tail, block, {logical: places[page] for logical, page in tail.sliding.items()},
            places[tail.partial] if tail.partial else None, copies, sum(self._sizes[page.kind] for page in places),
        )  # fmt: skip
        self._stores[tail] = store
        self.coming_bytes += store.bytes
        self.lane.queue(copies)
        return True

    def ended(self, step: int) -> None:
        """The copies of steps up to this one have ended: tails that are all there are live in host memory."""
        for copy in self.lane.ended(step):
            copy.host.copied = True
            copy.host.valid &= not copy.moved
            self.stored_bytes += self._sizes[copy.host.kind]
        for store in list(self._stores.values()):
            if not store.tail.live:
                self._drop(store)
            elif all(copy.host.copied for copy in store.copies):
                pages = store.pages
                if not all(page.valid for page in pages):
                    self._drop(store)
                elif all(page.copied for page in pages):
                    self._finish(store)

    def end(self) -> None:
        """An error has ended such copies: what has come stays, and nothing comes any more."""
        self.clear()
        self.lane.end()

    def clear(self) -> None:
        """What pages hold is not believed."""
        for store in list(self._stores.values()):
            self._drop(store)

    def forget_ended_tails(self) -> None:
        """Let go of what is no longer there to be copied."""
        for store in [each for each in self._stores.values() if not each.tail.live]:
            self._drop(store)

    def kept(self) -> list[HostPage]:
        """Pages that it keeps, each as often as it does; blocks in use keep theirs."""
        return [*self.lane.kept(), *(page for store in self._stores.values() for page in store.own)]

    def _make_room(self, global_pages: int, sliding_pages: int) -> bool:
        needed = {LayerKind.GLOBAL: global_pages, LayerKind.SLIDING: sliding_pages}
        if self._pool.fits(needed):
            return True
        if not self._pool.could_fit(needed):
            return False
        while (victim := next(self._index.victims(), None)) is not None:
            self._index.give_up(victim)
            if self._pool.fits(needed):
                return True
        return False

    def _finish(self, store: _Store) -> None:
        tail = store.tail
        original = tail.original or tail
        copy: Tail[HostPage] = Tail(
            store.block, tail.end, tail.lowest, tail.first, tail.tokens, store.partial, {**store.sliding}, tail.client,
            None, 0, tail.junction, superseded=tail.superseded, marks=tail.marks, original=original,
        )  # fmt: skip
        original.copies[self._index] = copy
        self._saved(original)
        self._index.insert(copy, [])
        self._release(store)

    def _drop(self, store: _Store) -> None:
        for copy in store.copies:
            copy.host.valid = False
        self.lane.withdraw(store.copies)
        self._release(store)

    def _release(self, store: _Store) -> None:
        del self._stores[store.tail]
        self.coming_bytes -= store.bytes
        self._index.stop_using(store.block)
        for page in store.own:
            self._pool.let_go(page)
