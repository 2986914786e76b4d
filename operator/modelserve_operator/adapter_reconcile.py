"""The heartbeat for adapters: gather, decide, write, tell workers. One function, safe to run at any moment.

Its key is the ModelServe: one set goes to each of its workers, made of all ModelAdapters that refer to it. It has a
queue of its own, so that workers that do not answer keep no ModelServe from its reconcile.

The order of writes is what an operator that ends between any two of them is safe by: an adapter is held before a
worker gets it; what took over is in the status before any worker is told to let the old version go; a ModelAdapter goes
once workers have said that they have nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from modelserve_operator.adapters.decision import SILENT_SECONDS, AdapterDecision, decide, look_again
from modelserve_operator.adapters.snapshot import AdapterWorker
from modelserve_operator.allowed import AllowRule
from modelserve_operator.gathering.adapter_gatherer import AdapterGatherer
from modelserve_operator.process import metrics
from modelserve_operator.process.work_queue import Key
from modelserve_operator.writing.adapter_writer import AdapterWriter
from modelserve_operator.writing.apply import Applier
from modelserve_operator.writing.status_contest import StatusContests

logger = logging.getLogger(__name__)


class AdapterReconciler:
    """Reconciles the adapters of a ModelServe at a time, each time from what is observed."""

    def __init__(self, gatherer: AdapterGatherer, applier: Applier, rules: Sequence[AllowRule]) -> None:
        self._gatherer, self._applier, self._rules = gatherer, applier, rules
        self._statuses = StatusContests()

    async def reconcile(self, key: Key) -> float | None:
        """Bring the adapters of one ModelServe a step nearer to their specs.

        Returns seconds until workers are asked again; None where no adapter refers to the ModelServe, whose pods find
        by whose key they take some before there are any. A write that failed is raised in the end, for the queue to
        back off.
        """
        snapshot = await self._gatherer.observe(key)
        decision = decide(snapshot, self._rules)
        writer = AdapterWriter(self._applier, self._statuses, decision)
        if not snapshot.adapters:
            metrics.forget_adapters(key)
            if snapshot.config_map is None:  # one that is there may have a set that we have not read yet
                await writer.write_set(decision)
            if writer.failures:
                raise writer.failures[0]
            return None
        not_held = await writer.hold()
        if len(decision.unheld) > len(not_held):
            return 0.0  # those that are held are other objects now, which are decided on anew
        decision = decision.without(not_held).without_takeovers(await writer.report())
        await writer.write_set(decision)
        await writer.write_rewrite(decision)
        refused = await self._tell(decision)
        await writer.release()
        metrics.show_adapters(key, len(snapshot.adapters), sum(each.ready_on(snapshot) for each in decision.taken))
        if writer.failures:
            raise writer.failures[0]
        again = look_again(decision)
        return min(again, SILENT_SECONDS) if refused else again

    async def _tell(self, decision: AdapterDecision) -> bool:
        """Give every worker its set; whether one has not taken it. What it says is in the statuses of the next pass."""
        model_serve = decision.snapshot.model_serve
        if model_serve is None or not decision.manages:
            return False
        uid = model_serve["metadata"]["uid"]

        async def give(worker: AdapterWorker) -> bool:
            problem = await self._gatherer.give(decision.snapshot.key, worker, decision.desired(worker), uid=uid)
            if problem is not None:
                logger.info("%s/%s: worker %s: %s", *decision.snapshot.key, worker.name, problem.message)
            return problem is not None

        asked = [worker for worker in decision.snapshot.workers if worker.loaded is not None]
        return any(await asyncio.gather(*map(give, asked)))
