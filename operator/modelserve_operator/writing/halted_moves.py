"""Tells administrators that moves to a newer worker have halted: a metric, the log, and an Event on the operator's own
Lease. The ModelServes that wait say it too, without names of other namespaces. I/O.
"""

from __future__ import annotations

import logging

from modelserve_operator.cluster.kinds import LEASE
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.process import metrics
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reasons import Reason
from modelserve_operator.settings import Settings
from modelserve_operator.writing.apply import Applier

logger = logging.getLogger(__name__)
REMEDY = "Set the worker's image back, or to one that runs; those that serve go on."


class HaltedMoves:
    """Who waits because the image fails elsewhere, and what was last told of it."""

    def __init__(self, gatherer: Gatherer, applier: Applier, settings: Settings) -> None:
        self._gatherer = gatherer
        self._applier = applier
        self._settings = settings
        self._waiting: dict[Key, str] = {}
        self._told: str | None = None

    def note(self, key: Key, halted: str | None) -> None:
        """What halts the move of one ModelServe now; None: nothing does."""
        if halted is None:
            self._waiting.pop(key, None)
        else:
            self._waiting[key] = halted
        metrics.HALTED_MOVES.set(len(self._waiting))

    async def tell(self) -> None:
        """Say what is new. It is said once, not by each that waits; an Event that cannot be written stops nothing."""
        words = next(iter(self._waiting.values()), None)
        if words is None or words == self._told:
            self._told = words
            return
        self._told = words
        message = f"{words}. {REMEDY}"
        logger.warning(message)
        if not self._settings.lease_name:
            return
        try:
            lease = await self._gatherer.lease(self._settings.lease_name)
        except KubeError as error:
            logger.warning("Lease %s cannot be read for an Event: %s", self._settings.lease_name, error)
            return
        if lease is not None:
            await self._applier.announce(lease, Transition(Reason.ROLLOUT_HALTED, message, True), kind=LEASE)
