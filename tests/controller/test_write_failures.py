"""Writes that the API server refuses: each ends in the status with its reason, and stops nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelserve.model.model_facts import ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    MODEL_SERVE,
    POD,
    SERVICE,
    ResourceKind,
)
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.reasons import Reason
from modelserve_operator.reporting.write_failures import denial

POLICY = "services \"tiny\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no Services"
WEBHOOK = 'admission webhook "guard.example.com" denied the request: not on Fridays'
QUOTA = 'services "tiny" is forbidden: exceeded quota: none, requested: count/services=1, used: 0, limited: 0'
RBAC = 'services "tiny" is forbidden: User "system:x" cannot patch resource "services" in API group "" in the namespace'
POD_SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
POD_QUOTA = 'pods "tiny-x" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=0, limited: pods=0'


@pytest.fixture
def refuse(world) -> Callable[..., None]:
    """Make every apply of a kind fail; no status: let them through again."""
    refusals: dict[ResourceKind, tuple[int, str]] = {}

    def guard(request: Any) -> None:
        if request.verb == "apply" and request.kind in refusals:
            raise KubeError(*refusals[request.kind])

    def refuse(kind: ResourceKind, status: int | None = None, message: str = "") -> None:
        refusals.pop(kind, None)
        if status is not None:
            refusals[kind] = (status, message)

    world.cluster.asked = guard
    return refuse


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, POLICY, "PolicyDenied"),
        (422, POLICY, "PolicyDenied"),  # the default of a ValidatingAdmissionPolicy
        (400, WEBHOOK, "PolicyDenied"),
        (403, QUOTA, "QuotaExceeded"),
        (403, RBAC, "Forbidden"),
        (403, 'unable to create: namespace "ml" because it is being terminated', "Forbidden"),
    ],
)
def test_a_refused_service_is_said_and_the_rest_is_written(
    world, refuse, tiny_spec: dict[str, Any], tiny_facts: ModelFacts, status: int, message: str, reason: str
) -> None:
    refuse(SERVICE, status, message)
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Stalled") == ("True", reason)
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Accepted") == ("True", "Valid"), "the spec is not at fault"
    assert message in world.message("Stalled")
    assert [event["reason"] for event in world.cluster.events if event["type"] == "Warning"] == [reason]
    assert len(world.cluster.of(DEPLOYMENT)) == len(world.cluster.of(DISRUPTION_BUDGET)) == 1
    assert (next(iter(world.due.values())) - world.now).total_seconds() == 60
    refuse(SERVICE)
    world.pass_time(60)
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert world.condition("Stalled") is None


@pytest.mark.parametrize("kind", [DEPLOYMENT, CONFIG_MAP, DISRUPTION_BUDGET, SERVICE])
def test_no_refused_write_hurts_what_serves(ready_world, refuse, kind: ResourceKind) -> None:
    old, pods = ready_world.served_hash(), ready_world.cluster.of(POD)
    refuse(kind, 403, RBAC)
    ready_world.cluster.remove(DISRUPTION_BUDGET, "ml", "tiny")
    ready_world.edit(context={"maxModelLen": 1024})
    for deployment in ready_world.cluster.of(DEPLOYMENT):
        ready_world.cluster.make_ready(deployment)
    ready_world.settle()
    assert ready_world.condition("Available") == ("True", "Serving")
    if kind is DISRUPTION_BUDGET:
        assert old not in ready_world.deployments() or ready_world.condition("Stalled") == ("True", "Forbidden")
    else:
        assert ready_world.served_hash() == old
        assert [pod for pod in ready_world.cluster.of(POD) if labels.label_of(pod, labels.PLAN_HASH) == old] == pods
    assert ready_world.condition("Stalled") == ("True", "Forbidden")


def test_while_the_service_cannot_be_switched_what_it_selects_does_not_get_smaller(ready_world, refuse) -> None:
    old = ready_world.served_hash()
    ready_world.edit(replicas=3)
    ready_world.make_ready()
    refuse(SERVICE, 403, RBAC)
    ready_world.edit(context={"maxModelLen": 1024})
    for _ in range(4):
        for deployment in ready_world.cluster.of(DEPLOYMENT):
            ready_world.cluster.make_ready(deployment)
        ready_world.settle()
    assert ready_world.served_hash() == old
    ready = [pod for pod in ready_world.cluster.pods_of(ready_world.deployment(old)) if Pod.from_body(pod).ready]
    assert len(ready) >= 2, "one made room within the surge before the switch was due"
    refuse(SERVICE)
    ready_world.pass_time(60)
    for _ in range(4):
        ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_what_is_over_goes_though_another_child_is_refused_for_ever(ready_world, refuse) -> None:
    """Deletions wait for the Service alone, which may still lead there."""
    old = ready_world.served_hash()
    refuse(DISRUPTION_BUDGET, 403, RBAC)
    ready_world.cluster.remove(DISRUPTION_BUDGET, "ml", "tiny")
    ready_world.edit(revisionHistoryLimit=0, context={"maxModelLen": 1024})
    for _ in range(4):
        for deployment in ready_world.cluster.of(DEPLOYMENT):
            ready_world.cluster.make_ready(deployment)
        ready_world.settle()
    new = ready_world.served_hash()
    assert new != old
    assert ready_world.condition("Stalled") == ("True", "Forbidden")
    assert list(ready_world.deployments()) == [new]
    kept = {labels.label_of(each, labels.PLAN_HASH) for each in ready_world.cluster.of(CONFIG_MAP)} - {None}
    assert kept == {new}
    assert len(ready_world.cluster.of(CONTROLLER_REVISION)) == 1


def test_a_refused_inspection_is_said(world, refuse, tiny_spec: dict[str, Any]) -> None:
    refuse(JOB, 403, QUOTA)
    world.create(tiny_spec)
    assert world.condition("Stalled") == ("True", "QuotaExceeded")
    refuse(JOB)
    world.pass_time(60)
    assert world.condition("Planned") == ("Unknown", "InspectingModel")
    assert world.condition("Stalled") is None


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_a_transient_failure_is_in_the_status_and_left_to_the_queue(ready_world, refuse, status: int) -> None:
    refuse(SERVICE, status, "etcdserver: request timed out")
    ready_world.cluster.remove(SERVICE, "ml", "tiny")
    with pytest.raises(KubeError, match="timed out"):
        ready_world.settle()
    assert ready_world.condition("Reconciling") == ("True", "WriteFailed")
    assert "timed out" in ready_world.message("Ready")
    assert ready_world.condition("Stalled") is None
    refuse(SERVICE)
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_conflict_is_settled_by_the_next_try_without_a_word(ready_world, refuse) -> None:
    before = ready_world.status()
    refuse(SERVICE, 409, "the object has been modified")
    ready_world.cluster.change(SERVICE, "tiny", lambda body: body["metadata"]["labels"].pop(labels.APP_NAME))
    with pytest.raises(KubeError, match="modified"):
        ready_world.settle()
    assert ready_world.status()["conditions"] == before["conditions"]


@pytest.mark.parametrize(("status", "again"), [(409, True), (429, True), (404, False)])
def test_a_status_that_could_not_be_written_is_written_again_unless_the_object_is_gone(
    ready_world, status: int, again: bool
) -> None:
    """No event follows a write that did not happen, so nobody else would try again."""
    refusals = [status]

    def refuse_once(request: Any) -> None:
        if request.verb == "json_patch" and request.subresource == "status" and refusals:
            if status == 409:  # somebody was faster
                ready_world.cluster.change(
                    MODEL_SERVE, "tiny", lambda body: body["metadata"].update(labels={"by": "us"})
                )
            raise KubeError(refusals.pop(), "refused")

    before = ready_world.status()["conditions"]
    ready_world.cluster.asked = refuse_once
    ready_world.cluster.change(MODEL_SERVE, "tiny", lambda body: body.pop("status"))
    if status == 429:
        with pytest.raises(KubeError, match="refused"):
            ready_world.settle()  # the queue's affair, with its growing waits
        ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert not refusals
    if again:
        assert ready_world.status()["conditions"] == before
    assert len(ready_world.cluster.of(DEPLOYMENT)) == 1


@pytest.mark.parametrize(
    ("message", "reason"), [(POD_QUOTA, "QuotaExceeded"), (POD_SECURITY, "PolicyDenied"), (WEBHOOK, "PolicyDenied")]
)
def test_pods_that_are_refused_are_no_capacity(ready_world, message: str, reason: str) -> None:
    """A quota on pods leaves none that could be pending: the Deployment's ReplicaFailure tells."""
    plan_hash = ready_world.served_hash()
    healthy = [pod["metadata"]["uid"] for pod in ready_world.cluster.of(POD)]
    make_pod, ready_world.cluster._make_pod = ready_world.cluster._make_pod, lambda owner, extra: None
    ready_world.edit(replicas=2)
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    name = f"tiny-{plan_hash}"
    ready_world.cluster.change(DEPLOYMENT, name, lambda body: body.update(status={"conditions": [failure]}))
    ready_world.settle()
    assert ready_world.condition("CapacityAvailable") == ("False", reason)
    assert "1 of 2 pods exist" in ready_world.message("CapacityAvailable")
    assert message in ready_world.message("Ready")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert [pod["metadata"]["uid"] for pod in ready_world.cluster.of(POD)] == healthy
    assert ready_world.condition("Reconciling") == ("True", reason), "it goes on as soon as the quota allows"
    ready_world.cluster._make_pod = make_pod
    ready_world.cluster.change(DEPLOYMENT, name, lambda body: body.pop("status"))
    ready_world.settle()
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_gated_pods_wait_and_are_no_failure(ready_world) -> None:
    ready_world.edit(replicas=2)
    waiting = next(pod for pod in ready_world.cluster.of(POD) if not pod["status"].get("conditions"))
    gate = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }
    ready_world.cluster.set_pod(waiting, phase="Pending", conditions=[gate])
    ready_world.settle()
    assert ready_world.condition("CapacityAvailable") == ("False", "SchedulingGated")
    assert ready_world.condition("Reconciling") == ("True", "SchedulingGated")
    assert ready_world.condition("Stalled") is None
    assert ready_world.condition("Available") == ("True", "Serving")


def test_the_status_of_another_model_serve_is_its_own(
    ready_world, refuse, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    before = ready_world.status()
    refuse(SERVICE, 403, QUOTA)
    ready_world.create(tiny_spec, name="other")
    ready_world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    ready_world.settle()
    assert ready_world.condition("Stalled", "other") == ("True", "QuotaExceeded")
    assert ready_world.status() == before
    assert ready_world.cluster.objects[MODEL_SERVE, "ml", "other"]["status"]["phase"] == "Stalled"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("failed quota: compute: must specify requests.cpu for: worker", Reason.QUOTA_EXCEEDED),
        ("maximum memory usage per Container is 1Gi, but limit is 2Gi", Reason.POLICY_DENIED),
        ('admission webhook "w" denied the request: user cannot use resource x', Reason.POLICY_DENIED),
        ('clusterroles is forbidden: User "u" cannot list resource "x" in API group ""', Reason.FORBIDDEN),
    ],
)
def test_who_denied_it_is_told_by_the_words(message: str, reason: Reason) -> None:
    assert denial(message) is reason
