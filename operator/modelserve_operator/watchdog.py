"""Finds watches that have frozen, and heals what they missed.

A LIST shows the newest resourceVersion of every kind. A live watch brings an event of that version or a later one
within seconds; a frozen one never does. A frozen operator is worse than one that restarts: the watchdog raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from modelserve_operator.gather import Gatherer
from modelserve_operator.kinds import ResourceKind
from modelserve_operator.kube import KubeError
from modelserve_operator.replanning import Replanning

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0


class WatchFrozenError(Exception):
    """A watch does not deliver what a LIST shows."""


class Watchdog:
    """`last_round_trip` is the monotonic time of the last good answer of the API server, for the liveness probe."""

    def __init__(self, gatherer: Gatherer, replanning: Replanning, *, interval: float, resync: float) -> None:
        self._gatherer = gatherer
        self._replanning = replanning
        self._interval = interval
        self._resync = resync
        self.last_round_trip = time.monotonic()

    def alive(self) -> bool:
        """False when the API server has not answered for five intervals: a restart may find another way to it."""
        return time.monotonic() - self.last_round_trip < 5 * self._interval + GRACE_SECONDS

    async def run(self) -> None:
        """Check for ever, every `interval`; every `resync` all keys are queued. Raises WatchFrozenError."""
        now = time.monotonic()
        check, resync = now + self._interval, now + self._resync
        while True:
            await asyncio.sleep(max(0.0, min(check, resync) - time.monotonic()))
            try:
                heard, newest = await self._gatherer.relist()
            except KubeError as error:
                logger.warning("watchdog: %s", error)
                check = time.monotonic() + self._interval
                resync = max(resync, check)
                continue
            self.last_round_trip = now = time.monotonic()
            check = now + self._interval
            if now >= resync:
                resync = now + self._resync
                self._replanning.everything()
            self._replanning.note(heard)
            await self._expect(newest)

    async def _expect(self, newest: dict[ResourceKind, int]) -> None:
        """A busy operator hears late, and is not frozen: while keys wait, or events of the kind still come, it is only
        looked at again by the next check."""
        before = Counter(self._gatherer.heard_events)
        await asyncio.sleep(GRACE_SECONDS)
        behind = [kind for kind, version in newest.items() if self._gatherer.heard_version.get(kind, 0) < version]
        frozen = [kind for kind in behind if self._gatherer.heard_events[kind] == before[kind]]
        if frozen and not self._replanning.busy:
            told = ", ".join(
                f"{kind.plural} (listed {newest[kind]}, heard {self._gatherer.heard_version.get(kind, 0)})"
                for kind in frozen
            )
            raise WatchFrozenError(f"no watch event within {GRACE_SECONDS:.0f} s of what a LIST shows: {told}")
