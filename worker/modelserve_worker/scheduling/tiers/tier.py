"""A tier behind the prefix cache: copies of the pool's prefixes somewhere else, and what is copied when.

Prefixes are copied ahead of need: while bytes that are free, or can be at no loss, are less than what the first in the
queue needs and a share of the pool, the prefixes that would go next are stored. So when memory is short, what goes can
be had again. Where too much is asked for at once, its admission waits for stores on their way, a second at most.

A request whose prefix reaches further in a tier than in the pool waits for it beside the queue, and is first in it when
the rows have come; from there on it is a hit like any other. Copies that are overdue are not waited for, and nothing
more is copied until they have ended. A direction that an error has ended on a rank is off on all of them: whoever waits
computes. Without stores what is there is still brought back; without loads nothing is worth keeping.

What moves the bytes is the subclass's: host memory (host_tier.py) has them moved by the device's steps. A tier may lose
time, copies and itself, which costs hits and nothing else.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from typing import ClassVar, NamedTuple

from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import HostCopy, PageCheck
from modelserve_worker.host_pages import LANE_ENDED, HostLayout, HostProgress
from modelserve_worker.scheduling.pages.arena import PageArena
from modelserve_worker.scheduling.prefix.cached_prefix import Hit
from modelserve_worker.scheduling.prefix.eviction_order import ROWS
from modelserve_worker.scheduling.prefix.prefix_cache import PrefixCache
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.scheduling.stats import TierCounters
from modelserve_worker.scheduling.tiers.copy_index import CopyIndex
from modelserve_worker.scheduling.tiers.pool_target import PoolTarget
from modelserve_worker.scheduling.tiers.tier_pool import TierPage, TierPool
from modelserve_worker.scheduling.tiers.transfer import Transfer

LONGEST_WAIT_S = 1.0  # of an admission for stores
_MOST_RESTORES = 2  # of one request, whose rows may have to go again before it begins
_STORED_SHARE = 4  # a share of the pool is free or stored
_AHEAD_SHARE = 8  # and where more is to be stored, a share of that beyond it, so that not every admission looks
_MOST_AT_ONCE = 8  # prefixes that one step begins to store, or finds no place for: it does not wait for more
_TIER_SHARE = 2  # and no more than a share of the tier, or what is stored would push itself out

logger = logging.getLogger(__name__)


class StepCopies(NamedTuple):
    """Copies that begin with a step, those that it waits for, and pages to look at."""

    stores: tuple[HostCopy, ...] = ()
    loads: tuple[HostCopy, ...] = ()
    loads_awaited: int = 0
    checks: tuple[PageCheck, ...] = ()


class Tier(ABC):
    """A tier has copies of prefixes of `cache`, whose pages are those of `arena`: at most `capacity_bytes` of one rank.

    `PrefixReuse` calls it from the scheduler's thread. A subclass says where the bytes are, by two methods. One that is
    further away overrides `prepare`, and stores what a nearer one has before that gives it up.
    """

    name: ClassVar[str]  # in `EngineStats`
    place: ClassVar[str]  # in the log

    @abstractmethod
    def heard(self, device: HostProgress) -> HostProgress:
        """How far its copies have come, asked before each step is scheduled; `device` is what the device says of those
        that steps took along."""

    @abstractmethod
    def send(self, step: int, copies: StepCopies) -> StepCopies:
        """Begin these copies, between the pages and places that they name, behind what steps before `step` write; and
        what of it `step` itself takes along to the device. Those awaited have to end before `step` begins."""

    def __init__(
        self, arena: PageArena, cache: PrefixCache, geometry: CacheGeometry, prices: PromptCost, capacity_bytes: int,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._cache = cache
        self._clock = time.monotonic
        sizes = {kind: geometry.page(kind).page_bytes for kind in LayerKind}
        # What a prompt leaves behind its window, and the page that its answer goes on in.
        pages = geometry.sliding_page.pages(geometry.global_page.page_tokens) + 1
        rings = 1 if geometry.draft_ring_pages(1) else 0
        self._left_bytes = pages * sizes[LayerKind.SLIDING] + (1 + rings) * sizes[LayerKind.GLOBAL]
        self.pool = TierPool(geometry, HostLayout.of(geometry, capacity_bytes))
        self.index = CopyIndex(self.pool, geometry, prices, cache)
        self.spills = Transfer(self.index, self.pool, sizes)
        self.restores = Transfer(PoolTarget(arena, cache, geometry), self.pool, sizes)
        arena.register(self.restores)
        self.queries = self.hits = 0
        self._asked: Counter[str] = Counter()  # restores, by request
        # For which versions of both tiers, bytes that are needed and that are free nothing is left to store.
        self._prepared = (-1, -1, 0, 0)
        self._held_back: tuple[str, float] | None = None  # the admission that waits for stores, and since when

    @property
    def queued(self) -> bool:
        """Whether there is something to copy."""
        return self.spills.lane.queued or self.restores.lane.queued

    def counters(self) -> TierCounters:
        """What `EngineStats` says of it."""
        return TierCounters(
            self.name, self.pool.capacity_bytes, self.pool.used_bytes,
            queries_total=self.queries, hits_total=self.hits, evictions_total=self.index.evictions,
            stored_bytes_total=self.spills.copied_bytes, restored_bytes_total=self.restores.copied_bytes,
            stores_off=self.spills.lane.off, loads_off=self.restores.lane.off,
        )  # fmt: skip

    def progress(self, device: HostProgress) -> None:
        """The device has come so far; a step is about to be scheduled."""
        progress = self.heard(device)
        self.pool.grow(progress.pieces)
        if LANE_ENDED in (progress.stored, progress.loaded):
            self._end(loads=progress.loaded == LANE_ENDED)
        self.spills.ended(progress.stored)
        self.restores.ended(progress.loaded)
        if self.restores.lane.stalled(self._clock()):
            self.restores.leave_waiting()

    def prepare(self, needed_bytes: int) -> None:
        """Store what would go next, before the first in the queue needs so many bytes."""
        arena = self._arena
        target = needed_bytes + self._left_bytes + arena.pool_bytes // _STORED_SHARE
        target = min(target, self.pool.capacity_bytes // _TIER_SHARE)
        known = (self._cache.version, self.index.version, target)
        settled = known == self._prepared[:3] and arena.free_bytes >= self._prepared[3] - target // 16
        off = self.spills.lane.off or self.spills.lane.stalled(self._clock())
        if arena.free_bytes >= target or settled or off:
            return
        spare = arena.available_bytes - arena.claimed_bytes + self.spills.coming_bytes()
        if spare >= target:
            return
        started = refused = 0
        for prefix in self._cache.victims(ROWS):
            if spare >= target + target // _AHEAD_SHARE or started == _MOST_AT_ONCE:
                return
            if refused == _MOST_AT_ONCE:
                break
            if prefix not in self.spills.sources:
                size = self._cache.unsaved.bytes_of(prefix)
                if self.spills.start(prefix):
                    spare, started = spare + size, started + 1
                else:
                    refused += 1
        self._prepared = (*known, arena.free_bytes)

    def holds_back(self, request_id: str, needed_bytes: int) -> bool:
        """Whether an admission that needs so many bytes waits for stores, so that nothing is lost to it."""
        from_pool = any(source.original is None for source in self.spills.sources)
        if not from_pool or self.spills.lane.stalled(self._clock()):
            return False
        if self._arena.available_bytes - self._arena.claimed_bytes >= needed_bytes + self._left_bytes:
            return False
        now = self._clock()
        if self._held_back is None or self._held_back[0] != request_id:
            self._held_back = request_id, now
        return now - self._held_back[1] < LONGEST_WAIT_S

    def find(self, request_id: str, chain: TokenChain, most: int) -> Hit[TierPage] | None:
        """Where the request would resume, at most at position `most`, if its rows were brought back."""
        lane = self.restores.lane
        if self._asked[request_id] >= _MOST_RESTORES or lane.off or lane.stalled(self._clock()):
            return None
        return self.index.find(chain, most)

    def restore(self, request_id: str, hit: Hit[TierPage]) -> bool:
        """Bring the rows of a hit back: the request waits for them from now on. False where the pool has no room."""
        if not self.restores.start(hit.prefix, request_id):
            return False
        self._asked[request_id] += 1
        self.index.touch(hit.prefix)
        return True

    def take_ready(self) -> list[str]:
        """Requests that wait no longer, in the order in which their rows came."""
        ready, self.restores.ready = self.restores.ready, []
        return ready

    def take(self, step: int, *, moves_pages: bool) -> StepCopies:
        """What goes out with a step, whose moves and page numbers are fixed."""
        self.spills.give_up_gone()
        now, awaited = self._clock(), self.restores.after(moved=moves_pages)
        copies = StepCopies(self.spills.lane.take(step, now), self.restores.lane.take(step, now), awaited)
        return self.send(step, copies)

    def begun(self, request_id: str) -> None:
        """The request holds its pages: what was brought back for it may go."""
        if request_id in self._asked:
            self.restores.begun(request_id)

    def gone(self, request_id: str) -> None:
        """The request has ended."""
        self.begun(request_id)
        self.restores.forget_request(request_id)
        del self._asked[request_id]

    def step_failed(self) -> None:
        """Copies that go out with steps may not have begun."""
        self.restores.clear()
        self.spills.clear()

    def distrust(self, digests: set[bytes]) -> None:
        """Copies of the pages of these blocks are not believed, nor what is on its way from them."""
        if any(digest in self.index for digest in digests):
            for prefix in list(self.index.prefixes):
                if any(block.digest in digests for block in prefix.block.upwards()):
                    self.index.evict(prefix)
        self.restores.give_up()

    def lose(self, places: Collection[tuple[LayerKind, int]]) -> None:
        """The tier has lost what was copied to these places: a subclass says so before it says that loads from there
        have ended. Whoever waits for anything computes."""
        self.pool.lose(places)
        for prefix in [each for each in self.index.prefixes if not all(page.valid for page in self.index.pages(each))]:
            self.index.evict(prefix)
        self.restores.give_up()

    def clear(self) -> None:
        """What pages hold, and what was copied from them, is not believed."""
        self.step_failed()
        self.index.clear()

    def _end(self, *, loads: bool) -> None:
        """An error has ended the stores of a rank, or its loads, without which nobody has use for stores."""
        if not self.spills.lane.off:
            self.spills.end()
            logger.error("cached prefixes are no longer copied to %s: a rank's copies ended with an error", self.place)
        if loads and not self.restores.lane.off:
            self.restores.end()
            self.index.clear()
            logger.error("cached prefixes no longer come back from %s: a rank's copies ended with an error", self.place)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every copy is kept by those who should, and bytes add up."""
        kept = self.index.kept()
        kept.update([*self.spills.kept(), *self.spills.lane.kept(), *self.restores.lane.kept()])
        self.pool.check_integrity(kept.items())


TierOf = Callable[[PageArena, PrefixCache, CacheGeometry, PromptCost], Tier]
"""Makes a tier behind a cache of the arena's pages."""
