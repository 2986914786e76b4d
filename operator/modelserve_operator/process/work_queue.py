"""The queue between events and reconciles: one entry per key, one reconcile of a key at a time, backoff.

What happened to one ModelServe goes before what happened to all of them: a user's change does not wait until thousands
are planned anew. Every BEHIND_SHARE-th reconcile is one of those behind, so that they go on however much happens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from modelserve_operator.process import metrics

logger = logging.getLogger(__name__)

BEHIND_SHARE = 8


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
        self._ahead: OrderedDict[Key, float] = OrderedDict()  # since when a key waits
        self._behind: OrderedDict[Key, float] = OrderedDict()
        self._again: dict[Key, bool] = {}  # added while it is being reconciled: whether it goes ahead then
        self._taken = 0
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wakeup = asyncio.Event()
        self._at_first_rest: Callable[[], None] | None = None

    def add(self, key: Key, *, ahead: bool = True) -> None:
        """Have a key reconciled; not `ahead`: once those that are have been."""
        if key in self._running:
            self._again[key] = ahead or self._again.get(key, False)
        elif key not in self._ahead:
            since = self._behind.pop(key, None) if ahead else self._behind.get(key)
            (self._ahead if ahead else self._behind)[key] = time.monotonic() if since is None else since
            self._wakeup.set()
        metrics.QUEUE_DEPTH.set(self.depth)

    @property
    def depth(self) -> int:
        """Keys that wait; those being reconciled are no more among them."""
        return len(self._ahead) + len(self._behind)

    def add_after(self, key: Key, delay: float) -> None:
        """Add `key` after `delay` seconds, or sooner when an earlier timer is already set."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + delay:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(delay, self._timer_fired, key)

    async def run(self, reconcile: Reconcile, *, workers: int, at_first_rest: Callable[[], None] | None = None) -> None:
        """Reconcile keys until cancelled, at most `workers` of them at the same time.

        `at_first_rest` is called once, when nothing waits and nothing is being reconciled any more.
        """
        self._at_first_rest = at_first_rest
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._work(reconcile))

    def _timer_fired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    def _take(self) -> Key:
        """The next key; there must be one."""
        self._taken += 1
        turn = self._behind and (self._taken % BEHIND_SHARE == 0 or not self._ahead)
        key, since = (self._behind if turn else self._ahead).popitem(last=False)
        metrics.QUEUE_SECONDS.observe(time.monotonic() - since)
        metrics.QUEUE_DEPTH.set(self.depth)
        return key

    async def _work(self, reconcile: Reconcile) -> None:
        while True:
            while not self._ahead and not self._behind:
                self._wakeup.clear()
                await self._wakeup.wait()
            key = self._take()
            self._running.add(key)
            try:
                await self._reconcile_once(reconcile, key)
            finally:
                self._running.discard(key)
                if key in self._again:
                    self.add(key, ahead=self._again.pop(key))
            if self._at_first_rest is not None and not (self.depth or self._running):
                at_rest, self._at_first_rest = self._at_first_rest, None
                at_rest()

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
