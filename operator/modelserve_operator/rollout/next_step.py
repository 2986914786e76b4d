"""The next step from the revisions that run to the one that should. Pure and stateless: a function of what is observed.

At every step the pods number at most replicas + maxSurge, and the ready ones do not fall below replicas by our doing,
unless downtime is allowed; then one pod at a time makes room where a pod of the old revision takes what one of the new
needs. An old revision of which no pod has loaded the model has nothing to lose: it makes room, and stays stopped. A
revision of which a pod ended for good stops growing: the pods that did not fail stay, and the old one gets back the
place of those that did.

The Service selects both revisions where what a client may ask of one holds on the other; else one: the new one as soon
as it has at least as many ready pods as the old. The old revision is scaled to zero once the new one is complete, and
deleted when its pods are gone: until then they drain, and the disruption budget can count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from modelserve.api.spec import RolloutSpec
from modelserve_operator.observed.terminal_failure import FailureRecord


class Exchange(Enum):
    """What the new revision gains when a pod of the old one goes."""

    ONE = auto()  # a place for a pod
    SOME = auto()  # a part of a place: it takes other numbers of the same GPUs
    NONE = auto()  # nothing: it runs on other nodes


@dataclass(frozen=True)
class Replacement:
    """How the new revision compares with the old one."""

    compatible: bool = False  # what a client may ask now holds on the new one and on this one
    exchange: Exchange = Exchange.ONE


@dataclass(frozen=True)
class RunningRevision:
    """A revision with a Deployment. Pods that are terminating, or have ended, do not count."""

    hash: str
    replicas: int  # spec.replicas of the Deployment
    pods: int = 0
    leaving: int = 0  # pods that are terminating, not in `pods`
    ready: int = 0
    loaded: int = 0  # pods that were ready since their last start; readiness may come and go
    to_move: int = 0  # ready pods on nodes that are drained, or about to be removed
    unschedulable: int = 0
    overdue: bool = False  # the Deployment's progress deadline has passed
    refused: str | None = None  # why the API server admits no more pods of it
    failed: int = 0  # pods that ended for good
    record: FailureRecord | None = None  # of the last failure, until as many pods as wanted are ready

    @property
    def stays(self) -> int:
        """Ready pods that its Deployment asks for; others are on their way out."""
        return min(self.ready, self.replicas)

    @property
    def surplus_unready(self) -> bool:
        """Whether there is a pod beside as many as wanted that is not ready: its Deployment replaces them."""
        return self.pods > self.replicas and self.ready < self.pods

    @property
    def failing(self) -> bool:
        """Whether growth has stopped; between attempts, that is."""
        return self.record is not None and not self.record.trying

    @property
    def fresh(self) -> bool:
        """Whether this is its first attempt, or the first that somebody asked for."""
        return self.record is None or self.record.attempts == 0

    def within(self, wanted: int) -> int:
        """Replicas that it may have now: while it fails, no more than it has without the pods that failed, or than were
        ready when it did (somebody may have wanted fewer meanwhile).

        The controller deletes pods that are not ready before those that are. Surplus pods are on their way out already.
        """
        if self.record is None:
            return wanted
        if self.record.trying:  # with one worker, unless somebody asked: each has a node, which may have to be bought
            proven = self.record.attempts == 0 or self.ready > self.record.ready
            return wanted if proven else min(wanted, max(self.ready, self.record.ready) + 1)
        surplus = max(0, self.pods - self.replicas)
        kept = self.replicas - max(0, self.failed - surplus)
        return max(0, min(wanted, kept if self.failed else max(kept, self.record.ready)))


@dataclass(frozen=True)
class Step:
    """What to do now: Deployments by revision hash, the Service's revision, and the revisions to delete."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    serve: str | None = None
    shared: bool = False  # the Service selects both revisions that run
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
    replacement: Mapping[str, Replacement] | None = None,
    contested: bool = False,
) -> Step:
    """`target`: hash of the committed revision, None without one; `serving`: what the Service selects now, None for no
    or every revision; `replacement`: how the target compares with each other revision; `contested`: what a stopped
    worker leaves would go to pods of others, so none is stopped that serves.
    """
    old = _old(target, running, serving)
    over = [running[each] for each in sorted(set(running) - {target, old.hash if old else None})]
    if target is None:
        return _retire(Step({old.hash: old.within(replicas)}, old.hash) if old else Step(), over)
    new = running.get(target, RunningRevision(target, 0))
    if new.stays >= replicas or old is None:
        wanted = replicas + _surge_to_move(new, replicas=replicas, rollout=rollout) if old is None else replicas
        complete = new.stays >= replicas and new.replicas in (replicas, wanted)
        step = Step({target: new.within(wanted)}, target, complete=complete)
        return _retire(step, [*over, *([old] if old else [])])
    manner = {each.hash: (replacement or {}).get(each.hash, Replacement()) for each in (old, *over)}
    step = _replace(
        new,
        old,
        serving=serving,
        replicas=replicas,
        rollout=rollout,
        exchange=manner[old.hash].exchange,
        contested=contested,
    )
    together = [each for each in (new, old, *over) if each.ready]
    shared = len(together) > 1 and all(manner[each.hash].compatible for each in (old, *over) if each.pods)
    return _retire(replace(step, shared=shared), over, needed=replicas - new.stays - old.stays if shared else 0)


def _surge_to_move(new: RunningRevision, *, replicas: int, rollout: RolloutSpec) -> int:
    """One more, until it is ready, where a worker has to leave its node; then its Deployment gives that one up."""
    surges = rollout.on_eviction == "SurgeFirst" and new.to_move > 0 and replicas > 0 and not new.failing
    return int(surges and new.ready <= replicas)


def kept(
    running: Mapping[str, RunningRevision], *, serving: str | None, selects_all: bool, replicas: int | None
) -> Step:
    """What runs goes on under a spec that is refused: the revision that serves has failed workers tried again and lost
    ones replaced, up to `replicas` (None: as many as it has), and no other is touched. `selects_all`: the Service does.
    """
    old = _old(None, running, serving)
    if old is None:
        return Step()
    others = [each for each in running.values() if each.hash != old.hash]
    missing = old.replicas if replicas is None else replicas - sum(each.replicas for each in others)
    shared = selects_all and any(each.ready for each in others)
    return Step({old.hash: old.within(max(old.replicas, missing))}, old.hash, shared=shared)


def _old(target: str | None, running: Mapping[str, RunningRevision], serving: str | None) -> RunningRevision | None:
    """The revision to be replaced: the one that serves or, once the Service has moved on, the readiest other."""
    others = [revision for revision in running.values() if revision.hash != target]
    if serving is not None and serving != target and serving in running:
        return running[serving]
    return max(others, key=lambda revision: (revision.ready, revision.hash), default=None)


def _retire(step: Step, over: Iterable[RunningRevision], *, needed: int = 0) -> Step:
    """Stop revisions that are over, and delete those without pods; `needed` ready ones of them stay for now."""
    stopped, gone = {}, []
    for each in over:
        if each.pods or each.leaving or each.replicas:
            stopped[each.hash] = max(0, min(each.stays, needed))
            needed -= stopped[each.hash]
        else:
            gone.append(each.hash)
    return replace(step, replicas={**step.replicas, **stopped}, delete=tuple(sorted(gone)))


def _replace(
    new: RunningRevision,
    old: RunningRevision,
    *,
    serving: str | None,
    replicas: int,
    rollout: RolloutSpec,
    exchange: Exchange,
    contested: bool,
) -> Step:
    keeps_serving = serving == new.hash and new.ready > 0
    serve = new.hash if keeps_serving or (new.ready > 0 and new.ready >= old.ready) else old.hash
    rest = max(0, replicas - new.stays)
    loses = bool(old.ready or old.loaded)
    # Leave for downtime is leave for one: an attempt after a failure does not stop what serves once more.
    leave = rollout.allow_downtime and exchange is not Exchange.NONE and not contested
    may_stop = new.fresh and (not loses or leave)
    stays_stopped = old.replicas == 0 and (may_stop or not rollout.allow_downtime)
    if new.failing:
        old_replicas = 0 if stays_stopped else old.within(rest)
        return Step({old.hash: old_replicas, new.hash: new.within(replicas)}, serve)
    if may_stop and loses and exchange is Exchange.ONE:
        return Step(_one_by_one(new, old, replicas=replicas, surge=rollout.max_surge), serve)
    if rollout.max_surge == 0:
        if not may_stop:
            return Step({old.hash: old.within(replicas), new.hash: new.stays}, old.hash, blocked=True)
        return Step({old.hash: 0, new.hash: replicas if old.pods == 0 else new.stays}, serve)
    old_replicas = 0 if stays_stopped or (may_stop and new.unschedulable) else old.within(rest)
    room = replicas + rollout.max_surge - max(old.pods, old_replicas)
    new_replicas = max(min(new.replicas, replicas), min(replicas, max(room, 0)))
    blocked = new.unschedulable > 0 and not may_stop
    return Step({old.hash: old_replicas, new.hash: new_replicas}, serve, blocked=blocked)


def _one_by_one(new: RunningRevision, old: RunningRevision, *, replicas: int, surge: int) -> dict[str, int]:
    """Pods of the new revision try beside the old one, and only where they find no room, as many of the old go."""
    several = max(1, surge)
    goal = min(replicas, new.stays + several)
    short = min(several, new.unschedulable if surge else goal - new.stays)
    old_replicas = min(old.replicas, max(0, replicas - new.stays - short))
    room = max(0, replicas + surge - max(old.pods, old_replicas))
    return {old.hash: old_replicas, new.hash: max(min(new.replicas, goal), min(goal, room))}
