"""Workers that keep failing without ending for good are said, during a rollout and long after it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import POD
from modelserve_operator.observed.pod_health import MOST_RESTARTS

PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff"}}
START = {"startedAt": "2026-01-01T00:00:00Z"}


def _text(moment: Any) -> str:
    return str(moment.isoformat().replace("+00:00", "Z"))


def _set(world, pod: dict[str, Any], container: dict[str, Any], *, unready_for: float = 0) -> None:
    """The pod's worker container, not ready for so many seconds."""
    since = _text(world.now - timedelta(seconds=unready_for))
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    states = [{"name": "worker", **container}]
    world.cluster.set_pod(pod, phase="Running", conditions=[ready], containerStatuses=states)
    world.settle()


def _crashed(restarts: int, *, seconds: int = 20, state: dict[str, Any] = BACK_OFF) -> dict[str, Any]:
    finished = f"2026-01-01T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"
    end = {"exitCode": 1, "message": "KeyError: 'lm_head'", **START, "finishedAt": finished}
    return {"restartCount": restarts, "state": state, "lastState": {"terminated": end}}


@pytest.fixture
def second(ready_world):
    """The world with one healthy worker, and the pod of a second one."""
    ready_world.edit(replicas=2)
    return next(pod for pod in ready_world.cluster.of(POD) if not pod["status"].get("conditions"))


def test_a_crash_loop_stalls_after_a_few_restarts_and_the_healthy_worker_serves(ready_world, second) -> None:
    _set(ready_world, second, _crashed(MOST_RESTARTS - 1))
    assert ready_world.condition("Stalled") is None
    _set(ready_world, second, _crashed(MOST_RESTARTS))
    assert ready_world.condition("Stalled") == ("True", "CrashLoop")
    assert "KeyError: 'lm_head'" in ready_world.message("Stalled")
    assert second["metadata"]["name"] in ready_world.message("Stalled")
    _set(ready_world, second, _crashed(MOST_RESTARTS + 1, state={"running": {}}))
    assert ready_world.condition("Stalled") == ("True", "CrashLoop"), "it does not flap between two restarts"
    warnings = [event["reason"] for event in ready_world.cluster.events if event["type"] == "Warning"]
    assert warnings == ["CrashLoop"]
    assert ready_world.condition("Available") == ("True", "Serving")
    assert list(ready_world.deployments().values()) == [2]
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_long_run_that_ends_badly_is_no_loop(ready_world, second) -> None:
    _set(ready_world, second, _crashed(MOST_RESTARTS + 3, seconds=7200, state={"running": {}}))
    assert ready_world.condition("Stalled") is None
    _set(ready_world, second, _crashed(MOST_RESTARTS + 3, seconds=7200), unready_for=900)
    assert ready_world.condition("Stalled") == ("True", "CrashLoop"), "unless it has been away for long"


def test_an_image_that_cannot_be_pulled_stalls_after_five_minutes(ready_world, second) -> None:
    _set(ready_world, second, {"state": PULL})
    assert ready_world.condition("Stalled") is None
    ready_world.pass_time(299)
    assert ready_world.condition("Stalled") is None
    ready_world.pass_time(1)
    assert ready_world.condition("Stalled") == ("True", "ImagePullFailed")
    assert "no such image" in ready_world.message("Stalled")
    assert [event["reason"] for event in ready_world.cluster.events if event["type"] == "Warning"] == [
        "ImagePullFailed"
    ]
    assert ready_world.condition("Available") == ("True", "Serving")
    ready_world.rest()
    ready_world.pass_time(3600)
    assert ready_world.rest() == []


def test_after_a_completed_rollout_it_is_said_too(ready_world) -> None:
    (pod,) = ready_world.cluster.of(POD)
    _set(ready_world, pod, _crashed(MOST_RESTARTS))
    assert ready_world.condition("Stalled") == ("True", "CrashLoop")
    assert ready_world.condition("Available") == ("False", "NotServing")
    warnings = [event["reason"] for event in ready_world.cluster.events if event["type"] == "Warning"]
    assert sorted(warnings) == ["CrashLoop", "NotServing"]


def test_the_crashes_of_an_injected_container_are_not_ours(ready_world, second) -> None:
    crashed = {"name": "proxy", **_crashed(MOST_RESTARTS)}
    ready_world.cluster.set_pod(second, phase="Running", containerStatuses=[{"name": "worker", "state": {}}, crashed])
    ready_world.settle()
    assert ready_world.condition("Stalled") is None


def test_another_model_serve_is_not_stalled(ready_world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts) -> None:
    ready_world.create(tiny_spec, name="other")
    ready_world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    ready_world.settle()
    (pod,) = ready_world.cluster.pods_of(ready_world.deployment_of("other"))
    _set(ready_world, pod, _crashed(MOST_RESTARTS))
    assert ready_world.condition("Stalled", "other") == ("True", "CrashLoop")
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def _placed(world, pod: dict[str, Any], state: dict[str, Any]) -> None:
    """It has a node now, and its container waits."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _text(world.now)}
    states = [{"name": "worker", "state": {"waiting": state}}]
    world.cluster.set_pod(pod, phase="Pending", conditions=[scheduled], containerStatuses=states)
    world.settle()


def _happens(world, pod: dict[str, Any], *events: tuple[str, str, str]) -> None:
    found = [
        {"type": kind, "reason": reason, "message": message, "lastTimestamp": f"2026-01-01T00:00:{number:02}Z"}
        for number, (kind, reason, message) in enumerate(events)
    ]
    world.cluster.happenings[pod["metadata"]["uid"]] = found


CREATING = {"reason": "ContainerCreating"}
NO_SECRET = ("Warning", "FailedMount", 'MountVolume.SetUp failed for volume "api-key": secret "nope" not found')


def test_a_mount_that_fails_is_said_within_about_a_minute(ready_world, second) -> None:
    _placed(ready_world, second, CREATING)
    _happens(ready_world, second, ("Normal", "Scheduled", "on a"), NO_SECRET)
    ready_world.pass_time(30)
    assert ready_world.condition("Stalled") is None
    ready_world.pass_time(30)
    assert ready_world.condition("Stalled") == ("True", "PodNotStarting")
    assert 'secret "nope" not found' in ready_world.message("Stalled")
    assert second["metadata"]["name"] in ready_world.message("Stalled")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert list(ready_world.deployments().values()) == [2]
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_cause_that_comes_later_is_found(ready_world, second) -> None:
    _placed(ready_world, second, CREATING)
    ready_world.pass_time(61)
    assert ready_world.condition("Stalled") is None
    _happens(ready_world, second, NO_SECRET)
    ready_world.pass_time(61)
    assert ready_world.condition("Stalled") == ("True", "PodNotStarting")


def test_a_large_image_that_is_being_pulled_is_no_failure(ready_world, second) -> None:
    _placed(ready_world, second, CREATING)
    _happens(ready_world, second, ("Warning", "FailedScheduling", "0/1"), NO_SECRET, ("Normal", "Pulling", "worker"))
    for _ in range(10):
        ready_world.pass_time(61)
    assert ready_world.condition("Stalled") is None
    assert ready_world.condition("Reconciling") == ("True", "RollingOut")


def test_a_container_that_cannot_be_made_is_said_with_its_cause(ready_world, second) -> None:
    _placed(ready_world, second, {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'})
    assert ready_world.condition("Stalled") is None
    ready_world.pass_time(61)
    assert ready_world.condition("Stalled") == ("True", "PodNotStarting")
    assert 'secret "hf" not found' in ready_world.message("Stalled")
