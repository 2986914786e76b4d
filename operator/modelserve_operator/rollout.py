"""The next step from the revisions that run to the one that should. Pure and stateless: a function of what is observed.

At every step the pods number at most replicas + maxSurge, and the ready ones do not fall below replicas by our doing,
unless downtime is allowed. An old revision of which no pod has loaded the model has nothing to lose: it makes room, and
stays stopped. The Service selects one revision: the new one as soon as it has at least as many ready pods as the old.
The old revision is deleted once the new one is complete; its pods then drain on their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelserve.api.spec import RolloutSpec
from modelserve_operator.observed import Failure


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
    failure: Failure | None = None


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
    if new.failure is not None:
        held = _hold(old, replicas=replicas, delete=superseded)
        return Step({**held.replicas, target: 0}, held.serve or target, superseded)
    if new.ready >= replicas or old is None:
        finished = (old.hash,) if old else ()
        complete = new.ready >= replicas and new.replicas == replicas
        return Step({target: replicas}, target, (*superseded, *finished), complete=complete)
    return _replace(new, old, serving=serving, replicas=replicas, rollout=rollout, superseded=superseded)


def _old(target: str | None, running: Mapping[str, RunningRevision], serving: str | None) -> RunningRevision | None:
    """The revision to be replaced: the one that serves or, once the Service has moved on, the readiest other."""
    others = [revision for revision in running.values() if revision.hash != target]
    if serving is not None and serving != target and serving in running:
        return running[serving]
    return max(others, key=lambda revision: (revision.ready, revision.hash), default=None)


def _hold(old: RunningRevision | None, *, replicas: int, delete: tuple[str, ...]) -> Step:
    """Keep what serves; a terminal failure of its own is not undone."""
    if old is None:
        return Step(delete=delete)
    return Step({old.hash: 0 if old.failure else replicas}, old.hash, delete)


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
    may_stop = rollout.allow_downtime or old.failure is not None or not (old.ready or old.loaded)
    old_replicas = 0 if old.failure else replicas - new.ready
    if rollout.max_surge == 0:
        if not may_stop:
            return Step({old.hash: replicas, new.hash: 0}, old.hash, superseded, blocked=True)
        return Step({old.hash: 0, new.hash: replicas if old.pods == 0 else 0}, serve, superseded)
    stopped_for_room = old.replicas == 0
    if may_stop and (new.unschedulable or stopped_for_room):
        old_replicas = 0
    room = replicas + rollout.max_surge - max(old.pods, old_replicas)
    new_replicas = max(min(new.replicas, replicas), min(replicas, max(room, 0)))
    blocked = new.unschedulable > 0 and not may_stop
    return Step({old.hash: old_replicas, new.hash: new_replicas}, serve, superseded, blocked=blocked)
