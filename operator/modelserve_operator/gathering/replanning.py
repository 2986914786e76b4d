"""Has what depends on the supply looked at again, once for many changes, and behind what users wait for."""

from __future__ import annotations

import asyncio

from modelserve_operator.gathering.adapter_gatherer import AdapterGatherer
from modelserve_operator.gathering.cache_gatherer import CacheGatherer
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.heard import Heard
from modelserve_operator.process.work_queue import WorkQueue

Adapters = tuple[AdapterGatherer, WorkQueue]
Caches = tuple[CacheGatherer, WorkQueue]


class Replanning:
    """Brings what was heard into the queue."""

    gathering_seconds = 0.5  # nodes come, go and are relabelled in crowds

    def __init__(
        self, gatherer: Gatherer, queue: WorkQueue, adapters: Adapters | None = None, caches: Caches | None = None
    ) -> None:
        """`adapters`: who tells whose adapters are concerned, and the queue of those; `caches`: the same of caches.
        None: nobody looks after them."""
        self._gatherer = gatherer
        self._queue = queue
        self._adapters, self._caches = adapters, caches
        self._waits = False

    def note(self, heard: Heard) -> None:
        """What one object brought is queued now; a change of the supply, with others like it, a moment later."""
        for key in heard.keys:
            self._queue.add(key)
        if self._adapters is not None:
            gatherer, queue = self._adapters
            for key in gatherer.concerned(heard):
                queue.add(key)
        if self._caches is not None:
            keeper, waiting = self._caches
            for key in keeper.concerned(heard):
                waiting.add(key)
        if heard.supply and not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_later(self.gathering_seconds, self._queue_concerned)

    @property
    def busy(self) -> bool:
        """Whether keys wait."""
        return self._queue.depth > 0

    def everything(self) -> None:
        """Every ModelServe that is known."""
        for key in self._gatherer.known_keys():
            self._queue.add(key, ahead=False)
        if self._adapters is not None:
            gatherer, queue = self._adapters
            for key in gatherer.model_serves():
                queue.add(key, ahead=False)
        if self._caches is not None:
            keeper, waiting = self._caches
            for key in keeper.known_keys():
                waiting.add(key, ahead=False)

    def _queue_concerned(self) -> None:
        self._waits = False
        for key in self._gatherer.concerned():
            self._queue.add(key, ahead=False)
