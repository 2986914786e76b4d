"""One reconcile of one ModelServe as it goes: what was observed and decided, the next step, what came of it. Pure.

`LOOKS`: seconds until time alone may change something, by the reason, which is the function's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from modelserve_operator import labels
from modelserve_operator.observed.inspection import seconds_left
from modelserve_operator.observed.pod_health import patience_left
from modelserve_operator.observed.snapshot import Observed, Pod
from modelserve_operator.planning.decision import Decision, Finding
from modelserve_operator.planning.drafters import waits_for_commits
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reasons import Reason
from modelserve_operator.reporting.capacity_buffers import RefusedBuffer
from modelserve_operator.reporting.routed import RefusedRoute
from modelserve_operator.reporting.write_failures import REFUSED_SECONDS, WriteFailure
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout.next_step import RunningRevision, Step, kept, next_step
from modelserve_operator.rollout.rivals import gives_away
from modelserve_operator.rollout.running import committed_revisions, replacements, running_revisions

RIVALS_SECONDS = 15.0
NEXT_TURN_SECONDS, LOOKS_PER_SECOND = 15.0, 10  # whether a move to a newer worker may begin: of one, of all together


@dataclass
class Reconciliation:
    """Steps of the reconciler read it, and leave here what later ones and the status need.

    `fleet`: how many ModelServes there are; `failed`: what the first child that could not be written met, `failure` in
    words for the status.
    """

    key: Key
    observed: Observed
    decision: Decision
    fleet: int = 0
    refused_route: RefusedRoute | None = None
    refused_buffer: RefusedBuffer | None = None
    failed: Exception | None = None
    failure: WriteFailure | None = None

    def __post_init__(self) -> None:
        rollout = self.decision.spec.rollout if self.decision.spec is not None else None
        self.running = running_revisions(self.observed, replicas=self.replicas, rollout=rollout)
        self.step = _step(self.observed, self.decision, self.running, replicas=self.replicas)

    @property
    def replicas(self) -> int | None:
        """As the spec says, or under a refused one as the last accepted one said; None where that is not known."""
        if self.decision.spec is not None:
            return self.decision.spec.replicas
        noted = (self.observed.model_serve.get("status") or {}).get("desiredReplicas")
        return noted if isinstance(noted, int) else None

    @property
    def exposed(self) -> Revision | None:
        """The wanted revision, where the step stops a worker whose place pods of others may take before it has it."""
        target, replicas = self.decision.target, self.replicas or 0
        if target is None or not gives_away(self.step, self.running, target=target.hash, replicas=replicas):
            return None
        return target

    def beside(self, observed: Observed) -> None:
        """The step again, now that rivals for its place are known."""
        self.observed = observed
        self.step = _step(observed, self.decision, self.running, replicas=self.replicas)

    @property
    def shrinking(self) -> set[str]:
        """Hashes of revisions that lose pods by the step."""
        wanted = self.step.replicas
        return {each for each in wanted if each in self.running and self.running[each].replicas > wanted[each]}

    @property
    def desired(self) -> int:
        """Workers that are wanted: where that is not known, as many as there are."""
        there = sum(revision.replicas for revision in self.running.values())
        return there if self.replicas is None else self.replicas

    @property
    def revisions(self) -> dict[str, Revision]:
        """Committed ones, by hash."""
        return committed_revisions(self.observed)

    @property
    def write_failure(self) -> Finding | None:
        """Of a write that is tried again at once."""
        return self.failure.finding if self.failure is not None and self.failure.delay is None else None

    @property
    def revision(self) -> Revision | None:
        """What the conditions speak of: the wanted revision or, while none is decided on, the one that serves."""
        return self.decision.target or self.revisions.get(self.step.serve or "")

    @property
    def target(self) -> RunningRevision | None:
        """That revision as it runs now."""
        revision = self.revision
        return self.running.get(revision.hash, RunningRevision(revision.hash, 0)) if revision is not None else None

    @property
    def target_pods(self) -> tuple[Pod, ...]:
        return self.observed.pods_of(self.revision.hash) if self.revision is not None else ()

    @property
    def complete(self) -> bool:
        """Whether it runs as it should."""
        target = self.target
        if self.decision.target is not None or target is None:
            return self.step.complete
        return target.stays >= self.desired == target.replicas

    @property
    def serving_ready(self) -> int:
        """Workers that the Service sends requests to, by its EndpointSlices."""
        return len(self.observed.endpoints & {pod.uid for pod in self.observed.pods})


def _step(
    observed: Observed, decision: Decision, running: Mapping[str, RunningRevision], *, replicas: int | None
) -> Step:
    serving, target = observed.selected, decision.target
    if decision.spec is None:
        selects_all = observed.service is not None and serving is None
        return kept(running, serving=serving, selects_all=selects_all, replicas=replicas)
    others = [each for plan_hash, each in committed_revisions(observed).items() if plan_hash in running]
    step = next_step(
        target=target.hash if target else None,
        running=running,
        serving=serving,
        replicas=decision.spec.replicas,
        rollout=decision.spec.rollout,
        replacement=replacements(others, target, selected=observed.selected) if target else {},
        contested=bool(observed.rivals),
    )
    if target is None or step.replicas.get(target.hash, 0) <= 1 or not waits_for_commits(target, observed):
        return step
    # One pod asks the Hub which commit it is to serve; the others follow once it has told, so that all serve the same.
    there = running[target.hash].replicas if target.hash in running else 0
    alone = min(step.replicas[target.hash], max(1, there))
    return replace(step, replicas={**step.replicas, target.hash: alone}, complete=False)


def failed_revision_is_tried_again(this: Reconciliation) -> float | None:
    """The first revision whose workers ended for good is due."""
    due = [each.record.retry_at for each in this.running.values() if each.record and each.failing]
    return max(0.0, (min(due) - this.observed.now).total_seconds()) + 0.1 if due else None


def pod_has_had_its_time(this: Reconciliation) -> float | None:
    """A pod that hangs is a fault from then on."""
    return patience_left(this.observed.pods, this.observed.now)


def workers_are_asked_again(this: Reconciliation) -> float | None:
    """A worker did not answer for its report."""
    return this.observed.ask_again


def inspection_has_had_its_time(this: Reconciliation) -> float | None:
    """An inspect Job is tried again, or hangs."""
    names = [labels.inspection_name(this.observed.name, each.hash) for each in this.decision.inspect]
    return min((left for name in names if (left := seconds_left(this.observed, name)) is not None), default=None)


def rivals_may_have_gone(this: Reconciliation) -> float | None:
    """No event tells of pods of others."""
    return RIVALS_SECONDS if this.observed.rivals else None


def claim_may_be_another(this: Reconciliation) -> float | None:
    """No event tells when a claim is made anew."""
    return REFUSED_SECONDS if this.decision.accepted.reason == Reason.VOLUME_NOT_SHAREABLE else None


def pools_have_been_gone_for_long(this: Reconciliation) -> float | None:
    """Another plan is committed then, where spec.plan.replan asks for it."""
    return this.decision.turn.again


def move_may_begin(this: Reconciliation) -> float | None:
    """Those that move to the newer worker first may be through."""
    return max(NEXT_TURN_SECONDS, this.fleet / LOOKS_PER_SECOND) if this.decision.move is not None else None


LOOKS: tuple[Callable[[Reconciliation], float | None], ...] = (
    failed_revision_is_tried_again,
    pod_has_had_its_time,
    workers_are_asked_again,
    inspection_has_had_its_time,
    rivals_may_have_gone,
    claim_may_be_another,
    pools_have_been_gone_for_long,
    move_may_begin,
)
