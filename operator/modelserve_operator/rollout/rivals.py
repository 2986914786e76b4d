"""Finds pods of others that would take the place which a rollout is about to make by stopping a worker. Pure.

One counts that the scheduler could put onto a node of ours, by node selector, required node affinity, taints, and what
it asks for. Nothing here knows of its volumes, of other pods that it wants near or far, or of expressions in claims: so
it counts for a while only, and a pod that can never start holds nobody up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from modelserve.api.schema_types import quantity_of
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.eligibility import lasting_taints, selects, unmet
from modelserve.planning.pools.resource_slices import DEVICE_CLASS, is_device_class
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import Observed, Pod, moment
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout.next_step import RunningRevision, Step

Body = Mapping[str, Any]

MOST_TOLD = 3
PATIENCE = timedelta(minutes=10)  # that a pod is unschedulable, and that one rollout waits for such pods


@dataclass(frozen=True)
class Ground:
    """A node with a worker that may be stopped. `body` None: it is not known, so that every pod may fit there."""

    body: Body | None = None
    devices: int = 0  # whole GPUs that ResourceSlices tell of

    @property
    def allocatable(self) -> Mapping[str, Any]:
        return mapping(mapping((self.body or {}).get("status")).get("allocatable"))


def gives_away(step: Step, running: Mapping[str, RunningRevision], *, target: str, replicas: int) -> bool:
    """Whether the step stops a worker that serves, and leaves fewer than wanted: to make room for one of the target."""
    new = running.get(target, RunningRevision(target, 0))
    old = [each for each in running.values() if each.hash != target]
    left = new.stays + sum(min(each.stays, step.replicas.get(each.hash, each.replicas)) for each in old)
    return left < min(replicas, new.stays + sum(each.stays for each in old))


def asks(pod: Body) -> bool:
    """Whether it asks for anything that a worker could hold: an extended resource, or a claim."""
    extended = any("/" in name for name in _requests(pod["spec"]))
    return extended or bool(pod["spec"].get("resourceClaims"))


def able(
    pods: Iterable[Body], observed: Observed, target: Revision, grounds: Iterable[Ground], now: datetime
) -> Iterator[tuple[Body, tuple[Ground, ...]]]:
    """Pods of others that the scheduler could put onto one of the grounds, and would not put behind the target's
    workers, with those grounds. What they ask for there is `takes`, or `by_claim`.
    """
    priority, there = max((pod.priority for pod in observed.pods_of(target.hash)), default=0), tuple(grounds)
    for pod in pods:
        spec = pod["spec"]
        if _ours_or_held(pod, observed) or (spec.get("priority") or 0) < priority or _hopeless(pod, now):
            continue
        if admitting := tuple(each for each in there if _admits(each, spec)):
            yield pod, admitting


def takes(pod: Body, target: Revision) -> bool:
    """Whether its containers ask for the extended resource that the target's workers ask for."""
    return target.plan.resource_name in _requests(pod["spec"])


def by_claim(claim: Body, target: Revision, grounds: Iterable[Ground]) -> bool:
    """Whether the spec of a ResourceClaim asks for GPUs of the grounds: the device class of a plan with claims, or of
    the driver where a node offers the same GPUs both ways. A class of another name is not looked into.
    """
    resource = target.plan.resource_name
    return any(
        count <= ground.devices or ground.body is None
        for name, count in _devices(claim)
        for ground in grounds
        if name == resource or (not is_device_class(resource) and name == DEVICE_CLASS and ground.devices)
    )


def exchanges(pod: Body, model_serve: Body | None, workers: Iterable[Body], near: Collection[str]) -> bool:
    """Whether it is a worker for which another one of its ModelServe is about to be stopped, on a node `near` ours: it
    takes no more than it leaves, and two that waited for each other would wait for ever.

    It is so with leave for downtime, while nothing is amiss, where no more of its revision wait than others are ready.
    """
    spec, status = ((model_serve or {}).get(part) or {} for part in ("spec", "status"))
    stalled = any(each["type"] == "Stalled" and each["status"] == "True" for each in status.get("conditions") or ())
    own = labels.label_of(pod, labels.PLAN_HASH)
    made = [str(each.get("name")) for each in pod["metadata"].get("ownerReferences") or ()]
    genuine = any(each.startswith(f"{labels.label_of(pod, labels.NAME)}-{own}-") for each in made)
    if own is None or not genuine or stalled or not mapping(spec.get("rollout")).get("allowDowntime"):
        return False
    wanted, waiting, leaving = _devices_of(pod["spec"]), 0, 0
    for each in workers:
        known = Pod.from_body(each)
        same = known.plan_hash == own
        waiting += same and known.node is None and not known.terminating and not known.ended
        leaving += not same and known.ready and known.node in near and _devices_of(each["spec"]) == wanted
    return waiting <= leaving


def _devices_of(spec: Body) -> tuple[dict[str, Decimal], int]:
    """Extended resources that a pod asks for, and how many claims it has."""
    asked = {name: amount for name, amount in _requests(spec).items() if "/" in name}
    return asked, len(spec.get("resourceClaims") or ())


def _devices(claim: Body) -> Iterator[tuple[str, int]]:
    """Device class and least number of each request, alternatives included."""
    for request in mapping(claim.get("devices")).get("requests") or ():
        for each in (mapping(request).get("exactly"), *(mapping(request).get("firstAvailable") or ())):
            stated = mapping(each)
            if stated.get("deviceClassName"):
                count = stated.get("count")
                yield str(stated["deviceClassName"]), count if isinstance(count, int) else 1


def _ours_or_held(pod: Body, observed: Observed) -> bool:
    """Whether it is one of ours, or not before the scheduler."""
    same = labels.label_of(pod, labels.NAME) == observed.name and pod["metadata"]["namespace"] == observed.namespace
    return bool(pod["spec"].get("schedulingGates")) or bool(pod["metadata"].get("deletionTimestamp")) or same


def _hopeless(pod: Body, now: datetime) -> bool:
    """Whether it has waited for so long that no GPU is likely to be what it lacks."""
    conditions = mapping(pod.get("status")).get("conditions") or ()
    times = [each.get("lastTransitionTime") for each in conditions if each.get("type") == "PodScheduled"]
    since = next(filter(None, map(moment, [*times, pod["metadata"].get("creationTimestamp")])), now)
    return now - since >= PATIENCE


def _admits(ground: Ground, spec: Body) -> bool:
    if ground.body is None:
        return True
    metadata, own = ground.body["metadata"], ground.body["metadata"].get("labels") or {}
    selector, tolerations = spec.get("nodeSelector") or {}, spec.get("tolerations") or ()
    if any(unmet(own, lasting_taints(ground.body.get("spec")), selector=selector, tolerations=tolerations)):
        return False
    required = mapping(mapping(spec.get("affinity")).get("nodeAffinity")).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required and not selects(required.get("nodeSelectorTerms"), own, name=metadata["name"]):
        return False
    return all(_fits(name, asked, ground.allocatable) for name, asked in _requests(spec).items())


def _fits(name: str, asked: Decimal, allocatable: Mapping[str, Any]) -> bool:
    """Whether an empty node could hold it. What is not told of cpu, memory and their like is enough."""
    offered = quantity_of(allocatable.get(name))
    return asked <= offered if offered is not None else "/" not in name or asked <= 0


def _requests(spec: Body) -> dict[str, Decimal]:
    """Of the whole pod: its containers together, or the init container that asks for most."""
    found: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        for name, asked in _asked(container).items():
            found[name] = found.get(name, Decimal(0)) + asked
    for container in spec.get("initContainers") or ():
        for name, asked in _asked(container).items():
            found[name] = max(found.get(name, Decimal(0)), asked)
    return found


def _asked(container: Body) -> dict[str, Decimal]:
    resources = mapping(container.get("resources"))
    stated = {**mapping(resources.get("limits")), **mapping(resources.get("requests"))}
    amounts = {str(name): quantity_of(amount) for name, amount in stated.items()}
    return {name: amount for name, amount in amounts.items() if amount is not None}


def named(pods: Iterable[Body], observed: Observed) -> tuple[str, ...]:
    """Rivals in words: pods of the same namespace by name, others without."""
    own = [pod["metadata"]["name"] for pod in pods if pod["metadata"]["namespace"] == observed.namespace]
    others = any(pod["metadata"]["namespace"] != observed.namespace for pod in pods)
    return (*(f"pod {name}" for name in own), *(["a pod of another namespace"] if others else []))


def told(rivals: tuple[str, ...]) -> str:
    """Why the old revision is not stopped for them."""
    more = f" and {len(rivals) - MOST_TOLD} more" if len(rivals) > MOST_TOLD else ""
    return f"{', '.join(rivals[:MOST_TOLD])}{more} would take the GPUs that it leaves"
