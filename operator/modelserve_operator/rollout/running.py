"""The revisions that exist and those that run, read from what was observed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.api.spec import RolloutSpec
from modelserve_operator import labels
from modelserve_operator.observed.forgeries import failure_record
from modelserve_operator.observed.snapshot import Body, Observed
from modelserve_operator.observed.terminal_failure import next_record
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout.next_step import Exchange, Replacement, RunningRevision


def committed_revisions(observed: Observed) -> dict[str, Revision]:
    """Committed revisions by hash."""
    return {revision.hash: revision for revision in observed.revisions}


def running_revisions(
    observed: Observed, *, replicas: int | None, rollout: RolloutSpec | None
) -> dict[str, RunningRevision]:
    """Revisions with a Deployment, by hash; `replicas`, if known, and `rollout` of a spec that is accepted."""
    running = {}
    asked = None if rollout is None else _asked(observed, rollout)
    for body in observed.deployments:
        plan_hash = labels.label_of(body, labels.PLAN_HASH)
        if plan_hash is None or body["metadata"].get("deletionTimestamp"):
            continue
        pods = observed.pods_of(plan_hash)
        states = (body.get("status") or {}).get("conditions") or ()
        there = int(body["spec"].get("replicas", 1))
        ready = sum(pod.ready for pod in pods)
        record = next_record(
            failure_record(body, observed.now),
            seen=next((pod.failure for pod in pods if pod.failure), None),
            ready=ready,
            wanted=there if replicas is None else replicas,
            asked=asked,
            now=observed.now,
        )
        running[plan_hash] = RunningRevision(
            hash=plan_hash,
            replicas=there,
            pods=len(pods),
            leaving=sum(pod.terminating for pod in observed.pods if pod.plan_hash == plan_hash),
            ready=ready,
            loaded=sum(pod.started for pod in pods),
            to_move=sum(pod.ready and pod.uid in observed.to_move for pod in pods),
            unschedulable=sum(pod.unschedulable is not None for pod in pods),
            overdue=any(state.get("reason") == "ProgressDeadlineExceeded" for state in states),
            refused=next((state.get("message") or "" for state in states if _refused(state)), None),
            failed=sum(pod.failure is not None for pod in pods),
            record=record,
        )
    return running


def _asked(observed: Observed, rollout: RolloutSpec) -> str:
    """Digest of what only people write: how a revision may be replaced, and the annotation that asks for an attempt.

    It names its fields: one that a later release adds must not have every failed revision tried again.
    """
    asked = labels.annotation_of(observed.model_serve, labels.RETRY)
    return labels.short_hash([rollout.max_surge, rollout.allow_downtime, asked])


def replacements(revisions: Iterable[Revision], target: Revision, *, selected: str | None) -> dict[str, Replacement]:
    """How the target compares with each of the other revisions that run; `selected`: the one that the Service selects,
    None for all of them.
    """
    others = {each.hash: each for each in revisions if each.hash != target.hash}
    serving = [each for each in (*others.values(), target) if selected in (None, each.hash)]
    promised = min((each.plan.max_model_len or 0 for each in serving), default=0)
    return {
        each: Replacement(_compatible(target, other, promised=promised), _exchange(target, other))
        for each, other in others.items()
    }


def _compatible(new: Revision, old: Revision, *, promised: int) -> bool:
    """Same model and name, and contexts that are no shorter than what clients were promised."""
    same = (new.model, new.served_name) == (old.model, old.served_name)
    return same and min(new.plan.max_model_len or 0, old.plan.max_model_len or 0) >= promised


def _exchange(new: Revision, old: Revision) -> Exchange:
    if (new.plan.accelerator, new.plan.resource_name) != (old.plan.accelerator, old.plan.resource_name):
        return Exchange.NONE
    return Exchange.ONE if new.plan.gpus_per_replica == old.plan.gpus_per_replica else Exchange.SOME


def _refused(state: Body) -> bool:
    return state.get("type") == "ReplicaFailure" and state.get("status") == "True"
