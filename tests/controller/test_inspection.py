"""The inspect Job is treated as a worker is: what keeps it is said, and what failed is tried again with backoff."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from modelserve.model_facts import ModelFacts
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.kinds import EVENT, JOB, POD

Body = dict[str, Any]
QUOTA = 'Error creating: pods "tiny-inspect-x" is forbidden: exceeded quota: small, requested: pods=1, limited: pods=0'
MISSING = TerminationMessage(reason=TerminationReason.InvalidCheckpoint, message="config.json is not there.").encode()


@pytest.fixture
def inspecting(ready_world, tiny_spec: Body):
    """A healthy bystander `tiny`, and `next`, whose model is being read."""
    ready_world.pass_time(600)  # the fake API server's objects are as old as it is
    ready_world.create({**tiny_spec, "model": {"uri": "pvc://weights/next"}}, name="next")
    assert ready_world.condition("Planned", "next") == ("Unknown", "InspectingModel")
    return ready_world


@pytest.fixture(autouse=True)
def bystander(inspecting):
    """Whatever becomes of `next`, `tiny` serves on with the pod that it has."""
    (pod,) = inspecting.cluster.pods_of(inspecting.deployment_of("tiny"))
    yield
    assert inspecting.cluster.pods_of(inspecting.deployment_of("tiny")) == [pod]
    assert inspecting.condition("Ready") == ("True", "RolledOut")


def _job(world) -> Body:
    (job,) = world.cluster.of(JOB)
    return job


def _refuse_pods(world) -> None:
    """A quota without room: the Job's controller makes no pod and says so in an Event."""
    world.cluster.run_controllers = lambda: None
    for pod in world.cluster.pods_of(_job(world)):
        world.cluster.remove(POD, "ml", pod["metadata"]["name"])
    uid = _job(world)["metadata"]["uid"]
    event = {"type": "Warning", "reason": "FailedCreate", "message": QUOTA, "lastTimestamp": "2026-01-01T00:10:00Z"}
    world.cluster.happenings[uid] = [event]


def test_a_quota_that_lets_no_pod_in_is_said(inspecting) -> None:
    _refuse_pods(inspecting)
    inspecting.settle()
    inspecting.pass_time(31)
    assert inspecting.condition("Stalled", "next") == ("True", "QuotaExceeded")
    assert inspecting.condition("Ready", "next") == ("False", "QuotaExceeded")
    assert "exceeded quota: small" in inspecting.message("Stalled", "next")
    assert [event["reason"] for event in inspecting.cluster.events].count("QuotaExceeded") == 1
    inspecting.cluster._make_pod(
        _job(inspecting), {"batch.kubernetes.io/job-name": _job(inspecting)["metadata"]["name"]}
    )
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None, "there is room now"
    assert inspecting.condition("Reconciling", "next") == ("True", "InspectingModel")


def test_a_job_without_a_pod_is_said_also_where_events_cannot_be_read(inspecting, caplog) -> None:
    inspecting.cluster.refused_kinds[EVENT] = 403
    _refuse_pods(inspecting)
    inspecting.settle()
    inspecting.pass_time(31)
    assert inspecting.condition("Stalled", "next") == ("True", "PodNotStarting")
    assert f"kubectl describe job {_job(inspecting)['metadata']['name']}" in inspecting.message("Stalled", "next")
    inspecting.pass_time(61)
    inspecting.pass_time(61)
    assert caplog.text.count("Events cannot be read") == 1


def test_an_image_that_cannot_be_pulled_is_said(inspecting) -> None:
    (pod,) = inspecting.cluster.pods_of(_job(inspecting))
    since = inspecting.now.isoformat().replace("+00:00", "Z")
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    inspecting.cluster.set_pod(
        pod,
        phase="Pending",
        conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": since}],
        containerStatuses=[{"name": "inspect", "state": waits}],
    )
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None
    inspecting.pass_time(301)
    assert inspecting.condition("Stalled", "next") == ("True", "ImagePullFailed")
    assert "no such image" in inspecting.message("Stalled", "next")


def test_a_mount_that_fails_is_said(inspecting) -> None:
    (pod,) = inspecting.cluster.pods_of(_job(inspecting))
    since = inspecting.now.isoformat().replace("+00:00", "Z")
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    creating = {"name": "inspect", "state": {"waiting": {"reason": "ContainerCreating"}}}
    inspecting.cluster.set_pod(pod, phase="Pending", conditions=[scheduled], containerStatuses=[creating])
    event = {"type": "Warning", "reason": "FailedMount", "message": "claim weights: no such path"}
    inspecting.cluster.happenings[pod["metadata"]["uid"]] = [event]
    inspecting.settle()
    inspecting.pass_time(61)
    assert inspecting.condition("Stalled", "next") == ("True", "PodNotStarting")
    assert "claim weights: no such path" in inspecting.message("Stalled", "next")


def _fail(world) -> None:
    world.cluster.end_job(message=MISSING, exit_code=TERMINAL_EXIT_CODE)
    world.settle()


def test_a_model_that_comes_after_its_model_serve_is_found(inspecting, tiny_facts: ModelFacts) -> None:
    """In GitOps the download and the ModelServe are applied together."""
    waited = []
    for _ in range(7):
        _fail(inspecting)
        assert inspecting.condition("Stalled", "next") == ("True", "InvalidCheckpoint")
        failed = _job(inspecting)["metadata"]["uid"]
        (key,) = [key for key in inspecting.due if key.name == "next"]
        delay = inspecting.due[key] - inspecting.now
        inspecting.pass_time(delay.total_seconds() - 1)
        assert _job(inspecting)["metadata"]["uid"] == failed, "not before its time"
        inspecting.pass_time(1)
        assert _job(inspecting)["metadata"]["uid"] != failed
        waited.append(round(delay / timedelta(minutes=1)))
    assert waited == [1, 2, 4, 8, 16, 30, 30]
    inspecting.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    inspecting.settle()
    assert inspecting.condition("Planned", "next") == ("True", "PlanCommitted")
    assert inspecting.cluster.of(JOB) == []


def test_who_asks_has_the_model_read_again_at_once(inspecting) -> None:
    _fail(inspecting)
    failed = _job(inspecting)["metadata"]["uid"]
    inspecting.restart_operator()
    inspecting.settle()
    assert _job(inspecting)["metadata"]["uid"] == failed, "a restart is no reason"
    inspecting.ask_for_a_retry("1", name="next")
    assert _job(inspecting)["metadata"]["uid"] != failed
    _fail(inspecting)
    assert labels.annotation_of(_job(inspecting), labels.RETRY) == "1"
    inspecting.rest()
    inspecting.pending = inspecting.gatherer.known_keys()
    inspecting.settle()
    assert inspecting.rest() == [], "asked once, tried once"


def test_pods_of_the_job_before_say_nothing_of_the_next(inspecting) -> None:
    _fail(inspecting)
    (old,) = inspecting.cluster.pods_of(_job(inspecting))
    inspecting.pass_time(61)
    inspecting.cluster.put(POD, {**old, "metadata": {**old["metadata"], "name": "left-behind"}})  # not collected yet
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None
    assert inspecting.condition("Planned", "next") == ("Unknown", "InspectingModel")
