"""Prefixes on their way from one tier to another, spilled or restored into the pool, and who waits for them.

A copy goes out with a step and ends some time after it. Until all of a prefix's have ended, its pages are kept in the
tier that they come to: it is an `Arrival`. Then the prefix is live there. An arrival that is given up costs a hit.
Whoever writes its pages next does so behind the copies (`after`), as does a move of one of them, so no memory is lost
to a copy that never ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from modelserve.model.architecture import LayerKind
from modelserve_worker.scheduling.prefix.cached_prefix import Block, CachedPrefix, P
from modelserve_worker.scheduling.tiers.copy_lane import Copy, CopyLane
from modelserve_worker.scheduling.tiers.tier_pool import TierPool


@dataclass(eq=False, slots=True)
class Arrival(Generic[P]):
    """A prefix of another tier on its way to this one, and its pages here."""

    source: CachedPrefix[Any]
    sliding: dict[int, P]
    partial: P | None
    copies: list[Copy]
    path: list[P]  # global pages of its blocks that are not in use by the index yet; kept, as the others are
    block: Block[P] | None = None  # in use, where others on their way share it
    requests: set[str] = field(default_factory=set)  # who wait for it
    bytes: int = 0  # of its copies
    ring: dict[int, P] = field(default_factory=dict)

    @property
    def kept(self) -> list[P]:
        """Each once."""
        partial = [self.partial] if self.partial is not None else []
        return [*self.path, *self.sliding.values(), *self.ring.values(), *partial]


class Target(Protocol[P]):
    """A target is the tier that prefixes come to. `Transfer` calls it."""

    def receive(self, source: CachedPrefix[Any]) -> Arrival[P] | None:
        """Keep pages for a prefix. None where there is no room for them, and nothing has changed."""
        ...

    def copied(self, copy: Copy) -> None:
        """It has ended."""
        ...

    def is_whole(self, arrival: Arrival[P]) -> bool | None:  # noqa: ARG002 - it is where nobody else copies any of it
        """Whether all of its rows are there once its own copies have ended; None where they never will be."""
        return True

    def arrive(self, arrival: Arrival[P]) -> CachedPrefix[P]:
        """The prefix is live from now on."""
        ...

    def release(self, arrival: Arrival[P], *, arrived: bool) -> None:
        """Let go of its pages; where it has not `arrived`, what was copied there is not to be believed."""
        ...


class Transfer(Generic[P]):
    """A transfer brings prefixes to `target`, by copies from or to places of `pool`. Bytes are per rank."""

    def __init__(self, target: Target[P], pool: TierPool, page_bytes: Mapping[LayerKind, int]) -> None:
        self.lane = CopyLane(pool)
        self.target = target
        self.ready: list[str] = []  # requests that wait no longer
        self.copied_bytes = 0
        self._page_bytes = page_bytes
        self._arrivals: dict[CachedPrefix[Any], Arrival[P]] = {}
        self._awaited: defaultdict[str, list[CachedPrefix[P]]] = defaultdict(list)  # that came, by who has not begun
        self._after = 0
        self._unheard = 0  # the last step of which copies may be on their way for ever, on some rank

    @property
    def sources(self) -> Collection[CachedPrefix[Any]]:
        """Prefixes that are on their way."""
        return self._arrivals.keys()

    def coming_bytes(self, *, awaited: bool = False) -> int:
        """Of pages that are being copied; `awaited`: of those that requests wait for."""
        return sum(each.bytes for each in self._arrivals.values() if each.requests or not awaited)

    def start(self, source: CachedPrefix[Any], *requests: str) -> bool:
        """Queue the copies of a live prefix, for which these requests wait. False where the target has no room."""
        arrival = self._arrivals.get(source) or self.target.receive(source)
        if arrival is None:
            return False
        if source not in self._arrivals:
            self._arrivals[source] = arrival
            arrival.bytes = sum(self._page_bytes[copy.tier_page.kind] for copy in arrival.copies)
            self.lane.queue(arrival.copies)
        arrival.requests.update(requests)
        return True

    def ended(self, step: int) -> None:
        """The copies of steps up to this one have ended: prefixes that are all there are live in the target."""
        for copy in self.lane.ended(step):
            self.copied_bytes += self._page_bytes[copy.tier_page.kind]
            self.target.copied(copy)
        for arrival in list(self._arrivals.values()):
            is_whole = self.target.is_whole(arrival)
            if is_whole is None:
                self._give_up(arrival)
            elif is_whole and all(copy.ended for copy in arrival.copies):
                prefix = self.target.arrive(arrival)
                prefix.awaited |= arrival.requests
                for request_id in arrival.requests:
                    self._awaited[request_id].append(prefix)
                self._release(arrival, arrived=True)

    def begun(self, request_id: str) -> None:
        """The request holds its pages, or has ended: what came for it may go."""
        for prefix in self._awaited.pop(request_id, ()):
            prefix.awaited.discard(request_id)

    def forget_request(self, request_id: str) -> None:
        """It waits no longer; the rows come all the same."""
        for arrival in self._arrivals.values():
            arrival.requests.discard(request_id)
        if request_id in self.ready:
            self.ready.remove(request_id)

    def leave_waiting(self) -> None:
        """Copies are overdue: whoever waits for them computes."""
        for arrival in self._arrivals.values():
            self.ready += sorted(arrival.requests)
            arrival.requests.clear()

    def give_up_gone(self) -> None:
        """Give up what is no longer there to be copied."""
        for arrival in [each for each in self._arrivals.values() if not each.source.live]:
            self._give_up(arrival)

    def give_up(self) -> None:
        """Give up all: whoever waits computes."""
        for arrival in list(self._arrivals.values()):
            self._give_up(arrival)

    def end(self) -> None:
        """An error has ended such copies: what has come stays, and nothing comes any more."""
        self.give_up()
        self._unheard = self.lane.end()

    def clear(self) -> None:
        """What pages hold is not believed, and a step that was to wait for copies may not have come to it."""
        self.give_up()
        self._after = max([self._after, self._unheard, *(copy.step for copy in self.lane.sent)])

    def reclaim(self, needed_bytes: int) -> None:  # noqa: ARG002 - see Keeper
        self.give_up()

    def forget(self, page: P) -> None:
        """See Keeper: give up what is on its way together with the page."""
        for arrival in [each for each in self._arrivals.values() if page in each.kept]:
            self._give_up(arrival)

    def after(self, *, moved: bool) -> int:
        """The step that is being made waits for copies of steps up to this one, 0 for none, before it `moved` pages."""
        if moved:
            for copy in self.lane.sent:
                if copy.moved and copy.page.number >= 0:
                    self._after, copy.number = max(self._after, copy.step), copy.page.number
        after, self._after = self._after, 0
        return after

    def kept(self) -> list[P]:
        """Pages of the target that it keeps, each as often as it does."""
        return [page for arrival in self._arrivals.values() for page in arrival.kept]

    def _give_up(self, arrival: Arrival[P]) -> None:
        self._after = max([self._after, *(copy.step for copy in arrival.copies)])
        self.lane.withdraw(arrival.copies)
        self._release(arrival, arrived=False)

    def _release(self, arrival: Arrival[P], *, arrived: bool) -> None:
        del self._arrivals[arrival.source]
        self.ready += sorted(arrival.requests)
        self.target.release(arrival, arrived=arrived)
