"""Writes what is decided of a ModelCache: its finalizer, its claim, its status and its Jobs, in the order that an
operator which ends between any two of them is safe by.
"""

from __future__ import annotations

from modelserve_operator import labels
from modelserve_operator.caches.decision import CacheDecision
from modelserve_operator.caches.reasons import CacheReason
from modelserve_operator.caches.status import CONDITIONS, stands, status_of, transitions
from modelserve_operator.cluster.kinds import CLAIM, JOB, MODEL_CACHE
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.writing.apply import WRITE_ERRORS, Applier, WriteError
from modelserve_operator.writing.reported_objects import ReportedObjects, with_foreign_conditions
from modelserve_operator.writing.status_contest import StatusContests

_NAMESPACE_GOES = "being terminated"  # the API server's words about a namespace that is


class CacheWriter:
    """The writes of one reconcile. What was refused is in `failures`, and the status says the first of them."""

    def __init__(self, applier: Applier, statuses: StatusContests, decision: CacheDecision) -> None:
        self._applier, self._decision = applier, decision
        self.failures: list[WriteError] = []
        self.turned = False  # whether a status was written that says something else to who reads the cache
        self._reports = ReportedObjects(
            applier, statuses, MODEL_CACHE, finalizer=labels.FREE_CACHE, failures=self.failures
        )

    async def hold(self) -> bool:
        """Have a deletion wait for us; whether it does. Nothing may be made before that."""
        return not self._decision.hold or await self._reports.finalize(self._decision.snapshot.body, held=True)

    async def make(self) -> WriteError | None:
        """The claim, and the next Job; what the API server says where it does not take one."""
        for kind, body in ((CLAIM, self._decision.claim), (JOB, self._decision.start)):
            try:
                if body is not None:
                    await self._applier.apply(kind, body)
            except WRITE_ERRORS as error:
                return error
        return None

    async def report(self) -> bool:
        """Write the status where it says something else than before, and announce what is new; whether it holds."""
        snapshot = self._decision.snapshot
        status = with_foreign_conditions(status_of(self._decision), snapshot.status, CONDITIONS)
        if snapshot.status == status:
            return True
        if not await self._reports.replace(snapshot.body, status, now=snapshot.now):
            return False
        self.turned = stands(snapshot.status) != stands(status)
        for transition in transitions(snapshot.status, status):
            await self._applier.announce(snapshot.body, transition, kind=MODEL_CACHE)
        return True

    async def discard(self) -> None:
        """Jobs whose answers are in the status, or that nobody waits for; and the claim of a cache that goes."""
        for kind, body in (
            *((JOB, each) for each in self._decision.discard),
            *(((CLAIM, self._decision.snapshot.claim),) if self._decision.drop_claim else ()),
        ):
            try:
                if body is not None:
                    await self._applier.delete(kind, body)
            except KubeError as error:
                self.failures.append(error)

    async def release(self) -> None:
        """Let it go."""
        await self._reports.finalize(self._decision.snapshot.body, held=False)

    async def abandon(self) -> None:
        """Let it go though its bytes are still there: the namespace goes, with every claim of it."""
        message = "The namespace is being deleted, and takes no Job that would remove the files."
        transition = Transition(CacheReason.FREE_ABANDONED, message, True)
        await self._applier.announce(self._decision.snapshot.body, transition, kind=MODEL_CACHE)
        await self.release()


def namespace_goes(error: WriteError | None) -> bool:
    """Whether a write was refused because the namespace is being deleted."""
    return isinstance(error, KubeError) and error.status == 403 and _NAMESPACE_GOES in str(error)
