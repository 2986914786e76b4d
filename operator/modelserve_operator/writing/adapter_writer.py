"""Writes what is decided of ModelAdapters: finalizers, statuses, the ConfigMap, and the sets that workers take.

What cannot be written of one adapter keeps no other from it.
"""

from __future__ import annotations

from modelserve_operator import labels
from modelserve_operator.adapters.decision import AdapterDecision
from modelserve_operator.adapters.objects import adapters_config_map, model_rewrite
from modelserve_operator.adapters.reasons import AdapterReason
from modelserve_operator.adapters.status import CONDITIONS, status_of, transition_of
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_ADAPTER, MODEL_REWRITE
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.writing.apply import WRITE_ERRORS, Applier, WriteError
from modelserve_operator.writing.reported_objects import ReportedObjects, with_foreign_conditions
from modelserve_operator.writing.status_contest import StatusContests


class AdapterWriter:
    """The writes of one reconcile. Every one follows a diff."""

    def __init__(self, applier: Applier, statuses: StatusContests, decision: AdapterDecision) -> None:
        self._applier, self._decision = applier, decision
        self.failures: list[WriteError] = []
        self._reports = ReportedObjects(
            applier, statuses, MODEL_ADAPTER, finalizer=labels.DRAIN_ADAPTER, failures=self.failures
        )

    async def hold(self) -> frozenset[str]:
        """Have deletions of what workers are about to get wait for them. Returns uids of those that do not."""
        found = [(each, await self._reports.finalize(each.body, held=True)) for each in self._decision.unheld]
        return frozenset(adapter.uid for adapter, done in found if not done)

    async def release(self) -> None:
        """Let go what is being deleted, and has nothing left to wait for."""
        for adapter in self._decision.released:
            if await self._reports.finalize(adapter.body, held=False) and adapter.uid in self._decision.abandoned:
                message = "Its time to drain was over before every worker had let it go; one that answers again will."
                transition = Transition(AdapterReason.DRAIN_ABANDONED, message, True)
                await self._applier.announce(adapter.body, transition, kind=MODEL_ADAPTER)

    async def write_set(self, decision: AdapterDecision) -> None:
        """For workers that start while nobody is there to tell them."""
        model_serve = decision.snapshot.model_serve
        if model_serve is None or not decision.manages:
            return
        try:
            await self._applier.apply(CONFIG_MAP, adapters_config_map(model_serve, decision))
        except WRITE_ERRORS as error:
            self.failures.append(error)

    async def write_rewrite(self, decision: AdapterDecision) -> None:
        """What an endpoint picker splits by: before workers are told to let go a version that it leads to."""
        snapshot = decision.snapshot
        if snapshot.model_serve is None or not snapshot.rewrites_served or not decision.manages:
            return
        wanted = model_rewrite(snapshot.model_serve, decision)
        try:
            if wanted is not None:
                await self._applier.apply(MODEL_REWRITE, wanted)
            elif snapshot.rewrite is not None:
                await self._applier.delete(MODEL_REWRITE, snapshot.rewrite)
        except WRITE_ERRORS as error:
            self.failures.append(error)

    async def report(self) -> frozenset[str]:
        """Write statuses that say something else than before, and announce what is new. Returns uids of those that
        could not be written."""
        failed = set()
        gone = {each.uid for each in self._decision.released}
        for adapter in self._decision.snapshot.adapters:
            if adapter.uid in gone or (adapter.leaving and not adapter.held):
                continue
            status = with_foreign_conditions(status_of(adapter, self._decision), adapter.status, CONDITIONS)
            if adapter.status == status:
                continue
            if not await self._reports.replace(adapter.body, status, now=self._decision.snapshot.now):
                failed.add(adapter.uid)
            elif (transition := transition_of(adapter, status)) is not None:
                await self._applier.announce(adapter.body, transition, kind=MODEL_ADAPTER)
        return frozenset(failed)
