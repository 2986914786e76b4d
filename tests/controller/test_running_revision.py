"""Where no plan is decided, the revision that runs is looked after as before, and the conditions speak of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_SERVE, POD, SERVICE
from modelserve_operator.observed.snapshot import Pod

ENDED = {
    "exitCode": TERMINAL_EXIT_CODE,
    "message": TerminationMessage(
        reason=TerminationReason.InvalidCheckpoint, message="model.safetensors is not there."
    ).encode(),
}
DRAFTER = {"uri": "hf://google/gemma-4-31B-it-assistant"}


def _refused(world) -> None:
    world.edit(drafter=DRAFTER)
    assert world.condition("Accepted") == ("False", "InvalidSpec")


def _invalid(world) -> None:
    world.edit(replicas="three")
    assert world.condition("Accepted") == ("False", "InvalidSpec")


def _waiting(world) -> None:
    world.edit(plan={"mode": "Manual"}, context={"maxModelLen": 1024})
    assert world.condition("Planned") == ("False", "WaitingForApproval")


def _previewed(world) -> None:
    world.edit(plan={"mode": "PreviewOnly"}, context={"maxModelLen": 1024})
    assert world.condition("Planned") == ("True", "PlanPreviewed")


def _inspecting(world) -> None:
    world.edit(model={"uri": "pvc://weights/other"})
    assert world.condition("Planned") == ("Unknown", "InspectingModel")


UNDECIDED = [_refused, _invalid, _waiting, _previewed, _inspecting]
undecided = pytest.mark.parametrize("edit", UNDECIDED, ids=[edit.__name__ for edit in UNDECIDED])


@pytest.fixture
def two(ready_world, tiny_spec: dict[str, Any], tiny_facts):
    """`tiny` with two workers, and a bystander."""
    ready_world.create(tiny_spec, name="other")
    ready_world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    ready_world.settle()
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    return ready_world


def _workers(world, name: str) -> list[dict[str, Any]]:
    return world.cluster.pods_of(world.deployment_of(name))


def _lose_all(world) -> None:
    """Every worker of `tiny` goes, and the next ones end for good."""
    for pod in _workers(world, "tiny"):
        world.cluster.remove(POD, "ml", pod["metadata"]["name"])
    world.settle()
    for pod in _workers(world, "tiny"):
        waits = {"name": "worker", "state": {"waiting": {}}, "lastState": {"terminated": ENDED}}
        world.cluster.set_pod(pod, phase="Running", containerStatuses=[waits])
    world.settle()


@undecided
def test_a_failed_worker_is_said_and_tried_again(two, edit: Callable[[Any], None]) -> None:
    bystander = _workers(two, "other")
    edit(two)
    _lose_all(two)
    assert two.deployment_of("tiny")["spec"]["replicas"] == 0
    assert two.condition("Available") == ("False", "NotServing")
    assert "model.safetensors is not there" in two.message("Stalled")
    assert "next attempt at" in two.message("Stalled")
    assert two.condition("Ready")[0] == "False"
    assert two.condition("WorkersReady") == ("False", "Stopped")
    two.pass_time(61)
    assert two.deployment_of("tiny")["spec"]["replicas"] == 1, "one tries it"
    two.make_ready()
    assert two.deployment_of("tiny")["spec"]["replicas"] == 2, "as many as the last accepted spec wanted"
    two.cluster.make_ready(two.deployment_of("tiny"))
    two.settle()
    assert two.condition("Available") == ("True", "Serving")
    assert "model.safetensors" not in str(two.status()["conditions"])
    assert _workers(two, "other") == bystander


def test_a_refused_spec_and_a_failed_worker_are_both_said(two) -> None:
    _refused(two)
    _lose_all(two)
    assert two.condition("Stalled") == ("True", "InvalidSpec")
    assert "spec.drafter.uri" in two.message("Stalled")
    assert "model.safetensors is not there" in two.message("Stalled")


def test_under_a_refused_spec_what_was_wanted_outlives_the_operator(two) -> None:
    _refused(two)
    _lose_all(two)
    two.restart_operator()
    two.settle()
    two.pass_time(61)
    two.make_ready()
    assert two.deployment_of("tiny")["spec"]["replicas"] == 2


def test_what_was_wanted_before_this_release_is_not_taken_for_none(two) -> None:
    """An object that an earlier release left with a refused spec and a worker that had failed."""
    _refused(two)
    _lose_all(two)

    def forget(body: dict[str, Any]) -> None:
        del body["status"]["desiredReplicas"]

    two.cluster.change(MODEL_SERVE, "tiny", forget)
    two.settle()
    assert "desiredReplicas" not in two.status()


def test_under_a_refused_spec_a_lost_service_is_made_again(two) -> None:
    _refused(two)
    two.cluster.remove(SERVICE, "ml", "tiny")
    two.settle()
    assert two.condition("Available") == ("True", "Serving")
    assert [body["metadata"]["name"] for body in two.cluster.of(SERVICE)] == ["other", "tiny"]


def test_a_refused_spec_in_a_rollout_leaves_both_revisions_and_the_service(two) -> None:
    two.edit(context={"maxModelLen": 1024})
    before = two.deployments()
    ready = {pod["metadata"]["uid"] for pod in two.cluster.of(POD) if Pod.from_body(pod).ready}
    two.rest()
    _refused(two)
    assert two.deployments() == before
    assert ready <= {pod["metadata"]["uid"] for pod in two.cluster.of(POD)}
    assert {write[0] for write in two.rest()} <= {"patch/status", "create"}


@undecided
def test_beside_a_worker_that_serves_no_plan_is_said_to_be_missing(two, edit: Callable[[Any], None]) -> None:
    edit(two)
    texts = [each["message"] for each in two.status()["conditions"]]
    assert not [text for text in texts if "No plan is committed" in text]
    assert two.condition("WorkersReady") == ("True", "AllReady")
    assert two.condition("CapacityAvailable") == ("True", "CapacitySufficient")


def test_a_preview_beside_what_runs_keeps_ready(two) -> None:
    _previewed(two)
    assert two.condition("Ready") == ("True", "RolledOut")
    pod = _workers(two, "tiny")[0]
    two.cluster.remove(POD, "ml", pod["metadata"]["name"])
    two.settle()
    assert two.condition("Ready") == ("False", "RollingOut")
    assert two.condition("Reconciling") == ("True", "RollingOut")
    assert two.condition("Stalled") is None


def test_facts_that_vanish_leave_a_running_one_ready(two, tiny_facts) -> None:
    bystander = _workers(two, "other")
    (facts,) = [body for body in two.cluster.of(CONFIG_MAP) if body["metadata"]["name"].startswith("tiny-model-")]
    before = {pod["metadata"]["uid"] for pod in two.cluster.of(POD)}
    two.cluster.remove(CONFIG_MAP, "ml", facts["metadata"]["name"])
    two.settle()
    assert two.condition("Ready") == ("True", "RolledOut")
    assert two.condition("Planned") == ("True", "PlanCommitted")
    two.cluster.end_job(message="", exit_code=1)
    two.settle()
    assert two.condition("Ready") == ("True", "RolledOut")
    assert two.condition("Stalled") is None
    assert "reads the model" in two.message("Planned") or "read again" in two.message("Planned")
    two.ask_for_a_retry("1")
    two.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    two.settle()
    assert [body["metadata"]["name"] for body in two.cluster.of(CONFIG_MAP)].count(facts["metadata"]["name"]) == 1
    assert before <= {pod["metadata"]["uid"] for pod in two.cluster.of(POD)}
    assert _workers(two, "other") == bystander
