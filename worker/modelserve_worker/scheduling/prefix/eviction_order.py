"""The order in which prefixes of one tier go, kept up as they change: nobody sorts thousands of them to give up one.

By what is lost with a prefix: nothing, a copy, or rows to compute again. Where nothing is lost the oldest goes first.
Of the others prefixes of clients that have more than an equal share of the bytes go before the rest, by their
priorities. Each is in a sorted list of all that are lost alike, and in one of its client's. Whose share is exceeded
changes with every prefix, and is looked at when somebody asks.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from modelserve_worker.scheduling.prefix.cached_prefix import CachedPrefix, P

NOTHING, COPY, ROWS = range(3)  # what is lost with a prefix


class EvictionOrder(Generic[P]):
    """Of prefixes whose loss `loss_of` says; who changes what it says, or a priority, calls `update`."""

    def __init__(self, loss_of: Callable[[CachedPrefix[P]], int]) -> None:
        self._loss_of = loss_of
        self._places: dict[CachedPrefix[P], tuple[int, float, int]] = {}  # loss, priority, number: least, the oldest
        self._sorted: dict[tuple[int, str | None], list[tuple[float, int, CachedPrefix[P]]]] = defaultdict(list)
        self._bytes: Counter[str] = Counter()  # by client, all above 0
        self._total_bytes = 0
        self._added = 0

    def add(self, prefix: CachedPrefix[P]) -> None:
        """Its bytes, of its client, stay what they are."""
        self._count(prefix, prefix.bytes)
        self._added += 1
        self._put(prefix, self._added)

    def update(self, prefix: CachedPrefix[P]) -> None:
        """Its priority, or what is lost with it, may have changed. One that is not here is none of its business."""
        place = self._places.get(prefix)
        if place is not None and place[:2] != self._now(prefix):
            self._take(prefix)
            self._put(prefix, place[2])

    def remove(self, prefix: CachedPrefix[P]) -> None:
        self._take(prefix)
        self._count(prefix, -prefix.bytes)

    def __iter__(self) -> Iterator[CachedPrefix[P]]:
        """The first to go first. Prefixes may go, or change, meanwhile; those that change may be met again."""
        return self.losing(NOTHING)

    def losing(self, least: int) -> Iterator[CachedPrefix[P]]:
        """Those with which at least so much is lost."""
        if least == NOTHING:
            yield from self._among((NOTHING, None))
        share = self._total_bytes / max(1, len(self._bytes))
        beyond = {client for client, used in self._bytes.items() if used > share}
        for loss in range(max(least, COPY), ROWS + 1):
            yield from self._among(*((loss, client) for client in beyond))
            yield from (prefix for prefix in self._among((loss, None)) if prefix.client not in beyond)

    def check_integrity(self, live: Iterable[CachedPrefix[P]]) -> None:
        """Raise AssertionError unless it has these prefixes, the oldest first, where they belong."""
        assert sorted(self._places, key=lambda prefix: self._places[prefix][2]) == list(live), "others are live"
        for prefix, (loss, priority, number) in self._places.items():
            assert (loss, priority) == self._now(prefix), "a prefix has changed, and keeps its place"
            for client in (None, prefix.client):
                among = self._sorted[loss, client]
                assert among[bisect_left(among, (priority, number))][2] is prefix
        assert sum(map(len, self._sorted.values())) == 2 * len(self._places)
        assert self._total_bytes == sum(self._bytes.values()) == sum(prefix.bytes for prefix in self._places)

    def _count(self, prefix: CachedPrefix[P], more_bytes: int) -> None:
        self._total_bytes += more_bytes
        self._bytes[prefix.client] += more_bytes
        if not self._bytes[prefix.client]:
            del self._bytes[prefix.client]

    def _now(self, prefix: CachedPrefix[P]) -> tuple[int, float]:
        loss = self._loss_of(prefix)
        return loss, prefix.priority if loss else 0.0

    def _put(self, prefix: CachedPrefix[P], number: int) -> None:
        loss, priority = self._now(prefix)
        self._places[prefix] = loss, priority, number
        for client in (None, prefix.client):
            insort(self._sorted[loss, client], (priority, number, prefix))

    def _take(self, prefix: CachedPrefix[P]) -> None:
        loss, priority, number = self._places.pop(prefix)
        for client in (None, prefix.client):
            among = self._sorted[loss, client]
            del among[bisect_left(among, (priority, number))]
            if not among:
                del self._sorted[loss, client]

    def _among(self, *keys: tuple[int, str | None]) -> Iterator[CachedPrefix[P]]:
        """Of these lists, each of which is looked at where it was left: none of them is copied."""
        return (prefix for _, _, prefix in heapq.merge(*map(self._in_order, keys)))

    def _in_order(self, key: tuple[int, str | None]) -> Iterator[tuple[float, int, CachedPrefix[P]]]:
        last: tuple[float, float] = (-math.inf, 0)
        while (among := self._sorted.get(key)) and (at := bisect_right(among, last)) < len(among):
            place = among[at]
            last = place[0], place[1] + 0.5
            yield place
