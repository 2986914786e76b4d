"""Tails on their way from host memory back into the pool, and the requests that wait for them.

The pages that they are copied into are cached ones that nobody reads yet: free bytes that are being filled. Where
running requests need them all the same, they are given up as the last of all, and whoever writes them next does so
behind the copies (`after`), as does a move of one of them. So no memory is lost to a copy that never ends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.scheduling.pages.arena import OutOfPagesError, Page, PageArena
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.tails import Tail
from modelserve_worker.scheduling.tiers.host_copies import Copy, CopyLane, in_memory_order
from modelserve_worker.scheduling.tiers.host_pool import HostPage, HostPool


@dataclass(eq=False, slots=True)
class _Restore:
    source: Tail[HostPage]
    way: list[Page]  # global pages of its blocks; all pages are kept
    sliding: dict[int, Page]
    partial: Page | None
    copies: list[Copy]
    requests: set[str] = field(default_factory=set)

    @property
    def pages(self) -> list[Page]:
        return [*self.way, *self.sliding.values(), *([self.partial] if self.partial else [])]


class HostRestores:
    """Into `cache`, whose pages are those of `arena`."""

    def __init__(self, pool: HostPool, arena: PageArena, cache: PrefixCache, geometry: CacheGeometry) -> None:
        self.lane = CopyLane(pool)
        self._arena = arena
        self._cache = cache
        self._geometry = geometry
        self._restores: dict[Tail[HostPage], _Restore] = {}
        self._awaited: defaultdict[str, list[Tail[Page]]] = defaultdict(list)  # that came, by who has not begun
        self._after = 0
        self._unheard = 0  # the last step of which copies may be on their way for ever, on some rank
        self.ready: list[str] = []  # requests that wait no longer
        self.restored_bytes = 0
        arena.register(self)

    @property
    def arriving_bytes(self) -> int:
        """Of pages that requests wait for."""
        waited_for = [each for each in self._restores.values() if each.requests]
        return sum(self._geometry.page(copy.page.kind).page_bytes for each in waited_for for copy in each.copies)

    def start(self, request_id: str, source: Tail[HostPage]) -> bool:
        """The request waits for these rows. False where the pool has no room for them."""
        restore = self._restores.get(source)
        if restore is None:
            try:
                restore = self._begin(source)
            except OutOfPagesError:
                return False
        restore.requests.add(request_id)
        return True

    def ended(self, step: int) -> None:
        """The copies of steps up to this one have ended: tails that are all there are live in the pool."""
        for copy in self.lane.ended(step):
            self.restored_bytes += self._geometry.page(copy.host.kind).page_bytes
        for restore in [r for r in self._restores.values() if all(0 < copy.step <= step for copy in r.copies)]:
            self._finish(restore)

    def arrived(self, request_id: str) -> None:
        """The request holds its pages, or has ended: what came for it may go."""
        for tail in self._awaited.pop(request_id, ()):
            tail.awaited.discard(request_id)

    def forget_request(self, request_id: str) -> None:
        """It waits no longer; the rows come all the same."""
        for restore in self._restores.values():
            restore.requests.discard(request_id)
        if request_id in self.ready:
            self.ready.remove(request_id)

    def leave_waiting(self) -> None:
        """Copies are overdue: whoever waits for them computes."""
        for restore in self._restores.values():
            self.ready += sorted(restore.requests)
            restore.requests.clear()

    def end(self) -> None:
        """An error has ended such copies: whoever waits for them computes, and nothing comes any more."""
        self.give_up()
        self._unheard = self.lane.end()

    def reclaim(self, needed_bytes: int) -> None:  # noqa: ARG002 - see Keeper
        """Give up all that is on its way."""
        self.give_up()

    def forget(self, page: Page) -> None:
        """Give up what is on its way together with the page."""
        self.give_up(page)

    def give_up(self, page: Page | None = None) -> None:
        """Let go of those that are on their way together with `page`, or of all."""
        for restore in [each for each in self._restores.values() if page is None or page in each.pages]:
            self._after = max([self._after, *(copy.step for copy in restore.copies)])
            self.lane.withdraw(restore.copies)
            self._release(restore)

    def clear(self) -> None:
        """What pages hold is not believed, and a step that was to wait for copies may not have come to it."""
        self.give_up()
        self._after = max([self._after, self._unheard, *(copy.step for copy in self.lane.sent)])

    def after(self, *, moved: bool) -> int:
        """The step that is being made waits for copies of steps up to this one, 0 for none, before it `moved` pages."""
        if moved:
            for copy in self.lane.sent:
                if copy.moved and copy.page.number >= 0:
                    self._after, copy.number = max(self._after, copy.step), copy.page.number
        after, self._after = self._after, 0
        return after

    def kept(self) -> list[Page]:
        """Pages that it keeps, each as often as it does."""
        return [page for restore in self._restores.values() for page in restore.pages]

    def _begin(self, source: Tail[HostPage]) -> _Restore:
        """Raises OutOfPagesError, and has changed nothing."""
        blocks = list(source.block.upwards())[-2::-1] if self._geometry.global_page.layers else []
        there = self._cache.pages_of(block.digest for block in blocks)
        missing = [block.page for block in blocks[len(there) :] if block.page is not None]
        missing += [source.partial] if source.partial else []
        for page in there:
            self._arena.keep(page)
        fresh: dict[HostPage, Page] = {}
        kinds = ((LayerKind.SLIDING, list(source.sliding.values())), (LayerKind.GLOBAL, missing))
        needed = sum(len(hosts) * self._geometry.page(kind).page_bytes for kind, hosts in kinds)
        cached = sum(self._geometry.page(page.kind).page_bytes for page in there if not page.entries)
        if needed + cached > self._arena.available_bytes:
            for page in there:
                self._arena.let_go(page)
            raise OutOfPagesError(f"{needed} bytes are to come back from host memory")
        for kind, hosts in kinds:
            pages = in_memory_order(self._arena.allocate_kept(kind, len(hosts)))
            fresh |= zip(sorted(hosts, key=lambda host: host.place), pages, strict=True)
        copies = [Copy(page, host) for host, page in fresh.items()]
        restore = _Restore(
            source,
            [*there, *(fresh[block.page] for block in blocks[len(there) :] if block.page is not None)],
            {logical: fresh[host] for logical, host in source.sliding.items()},
            fresh[source.partial] if source.partial else None,
            copies,
        )
        self._restores[source] = restore
        self.lane.queue(copies)
        return restore

    def _finish(self, restore: _Restore) -> None:
        source = restore.source
        block = self._cache.block_of(source.block.digests())
        behind = source.tokens[block.depth * self._cache.page_tokens - source.first :]
        same = block.tails.ending(behind, source.marks)
        tail = next((each for each in same if each.lowest <= source.lowest), None)
        if tail is None:
            tail = Tail(
                block, source.end, source.lowest, source.first, source.tokens, restore.partial, dict(restore.sliding),
                source.client, None, 0, source.junction, superseded=source.superseded, marks=source.marks,
            )  # fmt: skip
            self._cache.insert(tail, restore.way)
        if source.live and source.original is not None and not source.original.live:
            self._cache.stand_in(tail, source)
        tail.awaited |= restore.requests
        for request_id in restore.requests:
            self._awaited[request_id].append(tail)
        self._release(restore)

    def _release(self, restore: _Restore) -> None:
        del self._restores[restore.source]
        self.ready += sorted(restore.requests)
        for page in restore.pages:
            self._arena.let_go(page)
