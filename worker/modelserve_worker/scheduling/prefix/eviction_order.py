"""The order in which tails of one tier go, kept up as they change: nobody sorts thousands of them to give up one.

By what is lost with a tail: nothing, a copy, or rows to compute again. Where nothing is lost the oldest goes first. Of
the others tails of clients that have more than an equal share of the bytes go before the rest, by their priorities.
Each is in a sorted list of all that are lost alike, and in one of its client's. Whose share is exceeded changes with
every tail, and is looked at when somebody asks.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from modelserve_worker.scheduling.prefix.tails import P, Tail

NOTHING, COPY, ROWS = range(3)  # what is lost with a tail


class EvictionOrder(Generic[P]):
    """Of tails whose loss `loss_of` says; who changes what it says, or a priority, calls `update`."""

    def __init__(self, loss_of: Callable[[Tail[P]], int]) -> None:
        self._loss_of = loss_of
        self._places: dict[Tail[P], tuple[int, float, int]] = {}  # loss, priority, number: the oldest has the least
        self._sorted: dict[tuple[int, str | None], list[tuple[float, int, Tail[P]]]] = defaultdict(list)
        self._bytes: Counter[str] = Counter()  # by client, all above 0
        self._total_bytes = 0
        self._added = 0

    def add(self, tail: Tail[P]) -> None:
        """Its bytes, of its client, stay what they are."""
        self._count(tail, tail.bytes)
        self._added += 1
        self._put(tail, self._added)

    def update(self, tail: Tail[P]) -> None:
        """Its priority, or what is lost with it, may have changed. One that is not here is none of its business."""
        place = self._places.get(tail)
        if place is not None and place[:2] != self._now(tail):
            self._take(tail)
            self._put(tail, place[2])

    def remove(self, tail: Tail[P]) -> None:
        self._take(tail)
        self._count(tail, -tail.bytes)

    def __iter__(self) -> Iterator[Tail[P]]:
        """The first to go first. Tails may go, or change, meanwhile; those that change may be met again."""
        return self.losing(NOTHING)

    def losing(self, least: int) -> Iterator[Tail[P]]:
        """Those with which at least so much is lost."""
        if least == NOTHING:
            yield from self._among((NOTHING, None))
        share = self._total_bytes / max(1, len(self._bytes))
        beyond = {client for client, used in self._bytes.items() if used > share}
        for loss in range(max(least, COPY), ROWS + 1):
            yield from self._among(*((loss, client) for client in beyond))
            yield from (tail for tail in self._among((loss, None)) if tail.client not in beyond)

    def check_integrity(self, live: Iterable[Tail[P]]) -> None:
        """Raise AssertionError unless it has these tails, the oldest first, where they belong."""
        assert sorted(self._places, key=lambda tail: self._places[tail][2]) == list(live), "others are live"
        for tail, (loss, priority, number) in self._places.items():
            assert (loss, priority) == self._now(tail), "a tail has changed, and keeps its place"
            for client in (None, tail.client):
                among = self._sorted[loss, client]
                assert among[bisect_left(among, (priority, number))][2] is tail
        assert sum(map(len, self._sorted.values())) == 2 * len(self._places)
        assert self._total_bytes == sum(self._bytes.values()) == sum(tail.bytes for tail in self._places)

    def _count(self, tail: Tail[P], more_bytes: int) -> None:
        self._total_bytes += more_bytes
        self._bytes[tail.client] += more_bytes
        if not self._bytes[tail.client]:
            del self._bytes[tail.client]

    def _now(self, tail: Tail[P]) -> tuple[int, float]:
        loss = self._loss_of(tail)
        return loss, tail.priority if loss else 0.0

    def _put(self, tail: Tail[P], number: int) -> None:
        loss, priority = self._now(tail)
        self._places[tail] = loss, priority, number
        for client in (None, tail.client):
            insort(self._sorted[loss, client], (priority, number, tail))

    def _take(self, tail: Tail[P]) -> None:
        loss, priority, number = self._places.pop(tail)
        for client in (None, tail.client):
            among = self._sorted[loss, client]
            del among[bisect_left(among, (priority, number))]
            if not among:
                del self._sorted[loss, client]

    def _among(self, *keys: tuple[int, str | None]) -> Iterator[Tail[P]]:
        """Of these lists, each of which is looked at where it was left: none of them is copied."""
        return (tail for _, _, tail in heapq.merge(*map(self._in_order, keys)))

    def _in_order(self, key: tuple[int, str | None]) -> Iterator[tuple[float, int, Tail[P]]]:
        last: tuple[float, float] = (-math.inf, 0)
        while (among := self._sorted.get(key)) and (at := bisect_right(among, last)) < len(among):
            place = among[at]
            last = place[0], place[1] + 0.5
            yield place
