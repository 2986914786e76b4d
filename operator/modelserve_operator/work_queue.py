"""The queue between events and reconciles: one entry per key, one reconcile of a key at a time, backoff."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from modelserve_operator import metrics

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Namespace and name of a ModelServe."""

    namespace: str
    name: str


Reconcile = Callable[[Key], Awaitable[float | None]]
"""Bring one ModelServe a step nearer to its spec. Returns seconds after which to look again, or None for no hurry."""


class WorkQueue:
    """Keys to reconcile. `add` may be called at any time; a key that is being reconciled runs once more."""

    def __init__(self, *, first_delay: float = 0.5, longest_delay: float = 60.0) -> None:
        self._first_delay = first_delay
        self._longest_delay = longest_delay
        self._waiting: deque[Key] = deque()
        self._queued: set[Key] = set()  # in _waiting, or to be put there when the running reconcile ends
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wakeup = asyncio.Event()

    def add(self, key: Key) -> None:
        if key in self._queued:
            return
        self._queued.add(key)
        if key not in self._running:
            self._make_ready(key)

    def add_after(self, key: Key, delay: float) -> None:
        """Add `key` after `delay` seconds, or sooner when an earlier timer is already set."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + delay:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(delay, self._timer_fired, key)

    async def run(self, reconcile: Reconcile, *, workers: int) -> None:
        """Reconcile keys until cancelled, at most `workers` of them at the same time."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._work(reconcile))

    def _timer_fired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    def _make_ready(self, key: Key) -> None:
        self._waiting.append(key)
        metrics.QUEUE_DEPTH.set(len(self._waiting))
        self._wakeup.set()

    async def _work(self, reconcile: Reconcile) -> None:
        while True:
            while not self._waiting:
                self._wakeup.clear()
                await self._wakeup.wait()
            key = self._waiting.popleft()
            metrics.QUEUE_DEPTH.set(len(self._waiting))
            self._queued.discard(key)
            self._running.add(key)
            try:
                await self._reconcile_once(reconcile, key)
            finally:
                self._running.discard(key)
                if key in self._queued:
                    self._make_ready(key)

    async def _reconcile_once(self, reconcile: Reconcile, key: Key) -> None:
        started = time.monotonic()
        try:
            delay = await reconcile(key)
        except Exception:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            backoff = min(self._longest_delay, self._first_delay * 2 ** (failures - 1))
            backoff *= random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries, guards nothing
            logger.exception("reconcile of %s/%s failed (%d in a row); again in %.1f s", *key, failures, backoff)
            metrics.RECONCILES.labels("error").inc()
            self.add_after(key, backoff)
        else:
            self._failures.pop(key, None)
            metrics.RECONCILES.labels("ok").inc()
            if delay is not None:
                self.add_after(key, delay)
        finally:
            metrics.RECONCILE_SECONDS.observe(time.monotonic() - started)
