"""Finds watches that have died, and heals what they missed.

A stream that has frozen is noticed by kopf: it brings an event or a bookmark a minute, else kopf asks for the rest of
it (handlers.py). What is left is seldom, and so is the LIST that finds it (decision 0023): a watch whose task has
ended, and what happens between the first LIST and the watches. A LIST shows the newest resourceVersion of every kind; a
live watch brings an event of that version or a later one within seconds. An operator without a watch is worse than one
that restarts: the watchdog raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from modelserve_operator.cluster.kinds import ResourceKind
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.replanning import Replanning

logger = logging.getLogger(__name__)


class WatchFrozenError(Exception):
    """A watch does not deliver what a LIST shows."""


class Watchdog:
    """`last_round_trip` is the monotonic time of the last good answer of the API server, for the liveness probe."""

    grace_seconds = 20.0
    first_check_seconds = 30.0  # after the start: what fell between the first LIST and the watches is found then
    pulse_seconds = 60.0  # between two signs of life of the API server, of two small objects

    def __init__(self, gatherer: Gatherer, replanning: Replanning, *, interval: float, resync: float) -> None:
        self._gatherer = gatherer
        self._replanning = replanning
        self._interval = interval
        self._resync = resync
        self.last_round_trip = time.monotonic()

    def alive(self) -> bool:
        """False when the API server has not answered for five minutes: a restart may find another way to it."""
        return time.monotonic() - self.last_round_trip < 5 * self.pulse_seconds + self.grace_seconds

    async def run(self) -> None:
        """Check for ever, soon and then every `interval`; every `resync` all keys are queued.

        Raises WatchFrozenError.
        """
        now = time.monotonic()
        check = now + min(self.first_check_seconds, self._interval)
        resync, pulse = now + self._resync, now + self.pulse_seconds
        while True:
            await asyncio.sleep(max(0.0, min(check, resync, pulse) - time.monotonic()))
            pulse = time.monotonic() + self.pulse_seconds
            lists = min(check, resync) <= time.monotonic()
            try:
                heard, newest = await (self._gatherer.relist() if lists else self._gatherer.pulse())
            except KubeError as error:
                logger.warning("watchdog: %s", error)
                again = time.monotonic() + min(self.pulse_seconds, self._interval)
                check, resync = max(check, again), max(resync, again)
                continue
            self.last_round_trip = now = time.monotonic()
            if now >= resync:
                resync = now + self._resync
                self._replanning.everything()
            self._replanning.note(heard)
            if lists:
                check = now + self._interval
                await self._expect(newest)

    async def _expect(self, newest: dict[ResourceKind, int]) -> None:
        """A busy operator hears late, and is not frozen: while keys wait, or events of the kind still come, it is only
        looked at again by the next check."""
        before = Counter(self._gatherer.heard_events)
        await asyncio.sleep(self.grace_seconds)
        behind = [kind for kind, version in newest.items() if self._gatherer.heard_version.get(kind, 0) < version]
        frozen = [kind for kind in behind if self._gatherer.heard_events[kind] == before[kind]]
        if frozen and not self._replanning.busy:
            told = ", ".join(
                f"{kind.plural} (listed {newest[kind]}, heard {self._gatherer.heard_version.get(kind, 0)})"
                for kind in frozen
            )
            raise WatchFrozenError(f"no watch event within {self.grace_seconds:.0f} s of what a LIST shows: {told}")
