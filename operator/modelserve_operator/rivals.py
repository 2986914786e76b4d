"""Pods of others that would take the place which a rollout is about to make by stopping a worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelserve_operator import labels
from modelserve_operator.observed import Observed
from modelserve_operator.revision import Revision
from modelserve_operator.rollout import RunningRevision, Step

Body = Mapping[str, Any]

MOST_TOLD = 3


def gives_away(step: Step, running: Mapping[str, RunningRevision], *, target: str, replicas: int) -> bool:
    """Whether the step stops a worker that serves, and leaves fewer than wanted: to make room for one of the target."""
    new = running.get(target, RunningRevision(target, 0))
    old = [each for each in running.values() if each.hash != target]
    left = new.stays + sum(min(each.stays, step.replicas.get(each.hash, each.replicas)) for each in old)
    return left < min(replicas, new.stays + sum(each.stays for each in old))


def waiting_for_the_same(pods: Iterable[Body], observed: Observed, target: Revision) -> tuple[str, ...]:
    """Names of pods without a node that ask for the resource which the target's workers need, and that the scheduler
    would not put behind them. On the CPU there is no such resource.
    """
    resource, own = target.plan.resource_name, observed.pods_of(target.hash)
    if resource is None:
        return ()
    priority = max((pod.priority for pod in own), default=0)
    return tuple(
        f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        for pod in pods
        if _asks_for(pod, resource) and not _out_of_it(pod, observed) and (pod["spec"].get("priority") or 0) >= priority
    )


def _asks_for(pod: Body, resource: str) -> bool:
    containers = [*(pod["spec"].get("containers") or ()), *(pod["spec"].get("initContainers") or ())]
    return any(resource in ((each.get("resources") or {}).get("limits") or {}) for each in containers)


def _out_of_it(pod: Body, observed: Observed) -> bool:
    same = labels.label_of(pod, labels.NAME) == observed.name and pod["metadata"]["namespace"] == observed.namespace
    """Whether it is one of ours, or not before the scheduler."""
    return bool(pod["spec"].get("schedulingGates")) or bool(pod["metadata"].get("deletionTimestamp")) or same


def told(rivals: tuple[str, ...]) -> str:
    """Why the old revision is not stopped for them."""
    more = f" and {len(rivals) - MOST_TOLD} more" if len(rivals) > MOST_TOLD else ""
    return f"{', '.join(rivals[:MOST_TOLD])}{more} would take the GPUs that it leaves"
