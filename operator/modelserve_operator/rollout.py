"""The next step from the revisions that run to the one that should. Pure and stateless: a function of what is observed.

At every step the pods number at most replicas + maxSurge, and the ready ones do not fall below replicas by our doing,
unless downtime is allowed. An old revision of which no pod has loaded the model has nothing to lose: it makes room, and
stays stopped. A revision of which a pod ended for good stops growing: the pods that did not fail stay, and the old one
gets back the place of those that did. The Service selects one revision: the new one as soon as it has at least as many
ready pods as the old. The old revision is deleted once the new one is complete; its pods then drain on their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserve.api.spec import RolloutSpec
from modelserve_operator.terminal_failure import FailureRecord


@dataclass(frozen=True)
class RunningRevision:
    """A revision with a Deployment. Pods that are terminating do not count."""

    hash: str
    replicas: int  # spec.replicas of the Deployment
    pods: int = 0
    ready: int = 0
    loaded: int = 0  # pods that were ready since their last start; readiness may come and go
    unschedulable: int = 0
    overdue: bool = False  # the Deployment's progress deadline has passed
    refused: str | None = None  # why the API server admits no more pods of it
    failed: int = 0  # pods that ended for good
    record: FailureRecord | None = None  # of the last failure, until as many pods as wanted are ready

    @property
    def failing(self) -> bool:
        """Whether growth has stopped; between attempts, that is."""
        return self.record is not None and not self.record.trying

    @property
    def fresh(self) -> bool:
        """Whether this is its first attempt, or the first since the spec changed."""
        return self.record is None or self.record.attempts == 0

    def within(self, wanted: int) -> int:
        """Replicas that it may have now: while it fails, no more than it has without the pods that failed.

        The controller deletes pods that are not ready before those that are. Surplus pods are on their way out already.
        """
        if not self.failing:
            return wanted
        surplus = max(0, self.pods - self.replicas)
        return max(0, min(wanted, self.replicas - max(0, self.failed - surplus)))


@dataclass(frozen=True)
class Step:
    """What to do now: Deployments by revision hash, the Service's revision, and the revisions to delete."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    serve: str | None = None
    delete: tuple[str, ...] = ()
    blocked: bool = False  # no room to surge and no leave for downtime: the old revision stays
    complete: bool = False  # the target serves with all its replicas, and nothing else runs


def next_step(
    *,
    target: str | None,
    running: Mapping[str, RunningRevision],
    serving: str | None,
    replicas: int,
    rollout: RolloutSpec,
) -> Step:
    """`target`: hash of the committed revision, None without one; `serving`: what the Service selects now."""
    old = _old(target, running, serving)
    superseded = tuple(sorted(set(running) - {target, old.hash if old else None}))
    if target is None:
        return _hold(old, replicas=replicas, delete=superseded)
    new = running.get(target, RunningRevision(target, 0))
    if new.ready >= replicas or old is None:
        finished = (old.hash,) if old else ()
        complete = new.ready >= replicas and new.replicas == replicas
        return Step({target: new.within(replicas)}, target, (*superseded, *finished), complete=complete)
    return _replace(new, old, serving=serving, replicas=replicas, rollout=rollout, superseded=superseded)


def _old(target: str | None, running: Mapping[str, RunningRevision], serving: str | None) -> RunningRevision | None:
    """The revision to be replaced: the one that serves or, once the Service has moved on, the readiest other."""
    others = [revision for revision in running.values() if revision.hash != target]
    if serving is not None and serving != target and serving in running:
        return running[serving]
    return max(others, key=lambda revision: (revision.ready, revision.hash), default=None)


def _hold(old: RunningRevision | None, *, replicas: int, delete: tuple[str, ...]) -> Step:
    """Keep what serves."""
    if old is None:
        return Step(delete=delete)
    return Step({old.hash: old.within(replicas)}, old.hash, delete)


def _replace(
    new: RunningRevision,
    old: RunningRevision,
    *,
    serving: str | None,
    replicas: int,
    rollout: RolloutSpec,
    superseded: tuple[str, ...],
) -> Step:
    keeps_serving = serving == new.hash and new.ready > 0
    serve = new.hash if keeps_serving or (new.ready > 0 and new.ready >= old.ready) else old.hash
    rest = max(0, replicas - new.ready)
    # Leave for downtime is leave for one: an attempt after a failure does not stop what serves once more.
    may_stop = new.fresh and (rollout.allow_downtime or not (old.ready or old.loaded))
    stays_stopped = old.replicas == 0 and (may_stop or not rollout.allow_downtime)
    if new.failing:
        old_replicas = 0 if stays_stopped else old.within(rest)
        return Step({old.hash: old_replicas, new.hash: new.within(replicas)}, serve, superseded)
    if rollout.max_surge == 0:
        if not may_stop:
            return Step({old.hash: old.within(replicas), new.hash: new.ready}, serve, superseded, blocked=True)
        return Step({old.hash: 0, new.hash: replicas if old.pods == 0 else new.ready}, serve, superseded)
    old_replicas = 0 if stays_stopped or (may_stop and new.unschedulable) else old.within(rest)
    room = replicas + rollout.max_surge - max(old.pods, old_replicas)
    new_replicas = max(min(new.replicas, replicas), min(replicas, max(room, 0)))
    blocked = new.unschedulable > 0 and not may_stop
    return Step({old.hash: old_replicas, new.hash: new_replicas}, serve, superseded, blocked=blocked)
