"""A worker that ends for good: what is healthy stays, growth stops, the reason is kept, and it is tried again."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from modelserve.model.model_facts import ModelFacts
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEPLOYMENT, NODE, POD
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.observed.terminal_failure import FailureRecord, next_record

REASON = TerminationReason.InvalidCheckpoint
ENDED = {
    "exitCode": TERMINAL_EXIT_CODE,
    "message": TerminationMessage(reason=REASON, message="model.safetensors is not there.").encode(),
}


def _not_ready(world, plan_hash: str) -> list[dict[str, Any]]:
    pods = world.cluster.pods_of(world.deployment(plan_hash))
    return [pod for pod in pods if not Pod.from_body(pod).ready]


def _fail(world, plan_hash: str, *, count: int | None = None) -> None:
    """Workers that are not ready end for good, and the kubelet backs off."""
    for pod in _not_ready(world, plan_hash)[:count]:
        container = {
            "name": "worker",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ENDED},
        }
        world.cluster.set_pod(pod, phase="Running", containerStatuses=[container])
    world.settle()


def _ready_uids(world) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of(POD) if Pod.from_body(pod).ready}


@pytest.fixture
def failed_growth(ready_world):
    """One healthy worker, and a second one that failed for good."""
    ready_world.edit(replicas=2)
    _fail(ready_world, ready_world.served_hash())
    return ready_world


def test_a_failing_pod_leaves_every_ready_one(ready_world) -> None:
    plan_hash, healthy = ready_world.served_hash(), _ready_uids(ready_world)
    ready_world.edit(replicas=3)
    _fail(ready_world, plan_hash)
    assert _ready_uids(ready_world) == healthy != set()
    assert ready_world.deployments() == {plan_hash: 1}, "the GPUs of the failed pods are free"
    assert ready_world.condition("Available") == ("True", "Serving")
    assert ready_world.condition("Stalled") == ("True", "InvalidCheckpoint")
    assert ready_world.condition("Ready") == ("False", "InvalidCheckpoint")
    assert ready_world.condition("WorkersReady") == ("False", "Stopped")
    assert "model.safetensors is not there" in ready_world.message("Stalled")
    assert "1 of 3 workers are ready" in ready_world.message("WorkersReady")
    ready_world.rest()
    ready_world.restart_operator()
    ready_world.settle()
    assert ready_world.rest() == []
    assert _ready_uids(ready_world) == healthy


def test_another_model_serve_is_not_touched(failed_growth, tiny_spec: dict[str, Any], tiny_facts: ModelFacts) -> None:
    failed_growth.create(tiny_spec, name="other")
    failed_growth.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    failed_growth.settle()
    other = failed_growth.deployment_of("other")
    failed_growth.cluster.make_ready(other)
    failed_growth.settle()
    failed_growth.rest()
    failed_growth.pass_time(61)
    assert [write for write in failed_growth.rest() if write[2].startswith("other")] == []
    assert failed_growth.condition("Ready", "other") == ("True", "RolledOut")


def test_attempts_back_off_from_one_minute_to_thirty(failed_growth) -> None:
    plan_hash, healthy, waited = failed_growth.served_hash(), _ready_uids(failed_growth), []
    (key,) = failed_growth.due
    for _ in range(8):
        assert failed_growth.deployments() == {plan_hash: 1}
        delay = (failed_growth.due[key] - failed_growth.now).total_seconds()
        failed_growth.pass_time(delay - 1)
        assert failed_growth.deployments() == {plan_hash: 1}, "not before its time"
        failed_growth.pass_time(1)
        assert failed_growth.deployments() == {plan_hash: 2}, "the next attempt"
        assert failed_growth.condition("Stalled") == ("True", "InvalidCheckpoint"), "the reason is kept"
        assert _ready_uids(failed_growth) == healthy
        waited.append(round(delay / 60))
        _fail(failed_growth, plan_hash)
    assert waited == [1, 2, 4, 8, 16, 30, 30, 30]
    assert "9 times in a row" in failed_growth.message("Stalled")
    assert [event["reason"] for event in failed_growth.cluster.events].count("InvalidCheckpoint") == 1


def test_an_attempt_that_succeeds_clears_the_failure(failed_growth) -> None:
    failed_growth.pass_time(61)
    failed_growth.make_ready()
    assert failed_growth.condition("Stalled") is None
    assert failed_growth.condition("Ready") == ("True", "RolledOut")
    (deployment,) = failed_growth.cluster.of(DEPLOYMENT)
    assert labels.annotation_of(deployment, labels.TERMINAL_FAILURE) is None
    failed_growth.rest()
    failed_growth.pass_time(3600)
    assert failed_growth.rest() == []


@pytest.mark.parametrize(
    "ask",
    [lambda world: world.ask_for_a_retry("1"), lambda world: world.edit(rollout={"maxSurge": 2})],
    ids=["annotation", "rollout"],
)
def test_who_asks_for_an_attempt_gets_it_at_once(failed_growth, ask: Callable[[Any], None]) -> None:
    plan_hash, healthy = failed_growth.served_hash(), _ready_uids(failed_growth)
    ask(failed_growth)
    assert failed_growth.deployments() == {plan_hash: 2}
    assert failed_growth.condition("Stalled") is None, "a fresh attempt"
    assert failed_growth.condition("Reconciling") == ("True", "RollingOut")
    _fail(failed_growth, plan_hash)
    assert _ready_uids(failed_growth) == healthy
    assert "Failed once" in failed_growth.message("Stalled")
    failed_growth.rest()
    failed_growth.pass_time(1)
    assert failed_growth.rest() == [], "asked once, tried once"


def test_an_autoscaler_gets_no_attempt_before_its_time(failed_growth) -> None:
    """It writes replicas every 15 s, down to what is healthy and up again; the count is the revision's."""
    plan_hash, healthy = failed_growth.served_hash(), _ready_uids(failed_growth)
    for replicas in (3, 1, 2, 0, 4):
        failed_growth.edit(replicas=replicas)
        assert failed_growth.deployments() == {plan_hash: min(replicas, 1)}
    assert failed_growth.condition("Stalled") == ("True", "InvalidCheckpoint")
    failed_growth.make_ready()
    failed_growth.pass_time(61)
    assert failed_growth.deployments() == {plan_hash: 2}, "one tries it, and has a node: not three"
    _fail(failed_growth, plan_hash)
    assert "Failed 2 times in a row" in failed_growth.message("Stalled")
    failed_growth.edit(replicas=1)
    failed_growth.pass_time(121)
    failed_growth.edit(replicas=3)
    _fail(failed_growth, plan_hash)
    assert "Failed 3 times in a row" in failed_growth.message("Stalled"), "fewer wanted was no success"
    assert len(_ready_uids(failed_growth)) == len(healthy) == 1


def test_once_the_one_that_tries_is_ready_all_the_others_follow(failed_growth) -> None:
    plan_hash = failed_growth.served_hash()
    failed_growth.edit(replicas=5)
    failed_growth.pass_time(61)
    assert failed_growth.deployments() == {plan_hash: 2}
    failed_growth.make_ready()
    assert failed_growth.deployments() == {plan_hash: 5}
    failed_growth.make_ready()
    assert failed_growth.condition("Ready") == ("True", "RolledOut")


def test_an_attempt_takes_the_place_of_no_worker_that_is_lost_meanwhile(failed_growth) -> None:
    """What served before is replaced as ever, beside the one that tries."""
    plan_hash = failed_growth.served_hash()
    failed_growth.edit(replicas=5)
    failed_growth.pass_time(61)
    (ready,) = [each for each in failed_growth.cluster.of(POD) if Pod.from_body(each).ready]
    failed_growth.cluster.remove(POD, "ml", ready["metadata"]["name"])
    failed_growth.settle()
    assert failed_growth.deployments() == {plan_hash: 2}


def test_who_asks_for_an_attempt_gets_all_of_it(failed_growth) -> None:
    plan_hash = failed_growth.served_hash()
    failed_growth.edit(replicas=5)
    failed_growth.ask_for_a_retry("now")
    assert failed_growth.deployments() == {plan_hash: 5}


def test_a_failure_is_forgotten_an_hour_after_nothing_was_missing(failed_growth) -> None:
    failed_growth.edit(replicas=1)
    failed_growth.pass_time(61)
    (deployment,) = failed_growth.cluster.of(DEPLOYMENT)
    assert labels.annotation_of(deployment, labels.TERMINAL_FAILURE) is not None
    failed_growth.pass_time(3600)
    failed_growth.pending = failed_growth.gatherer.known_keys()
    failed_growth.settle()
    (deployment,) = failed_growth.cluster.of(DEPLOYMENT)
    assert labels.annotation_of(deployment, labels.TERMINAL_FAILURE) is None


def test_an_autoscaler_does_not_have_downtime_taken_once_more(ready_world) -> None:
    old = ready_world.served_hash()
    ready_world.edit(context={"maxModelLen": 1024}, rollout={"maxSurge": 0, "allowDowntime": True})
    new = ready_world.revision()
    assert ready_world.deployments()[old] == 0, "leave for downtime, once"
    _fail(ready_world, new)
    ready_world.cluster.make_ready(ready_world.deployment(old))
    ready_world.settle()
    healthy = _ready_uids(ready_world)
    for replicas in (2, 1):
        ready_world.edit(replicas=replicas)
        ready_world.pass_time(61)
        assert ready_world.deployments()[old] == replicas
        assert healthy <= _ready_uids(ready_world), "what serves again is not stopped"
        assert ready_world.condition("Available") == ("True", "Serving")


def test_scaling_to_what_is_healthy_is_ready_again(failed_growth) -> None:
    failed_growth.edit(replicas=1)
    assert failed_growth.condition("Ready") == ("True", "RolledOut")
    assert failed_growth.condition("Stalled") is None


def _node(world, name: str, *, ready: bool = True, heartbeat: str = "1") -> None:
    conditions = [{"type": "Ready", "status": str(ready), "lastHeartbeatTime": heartbeat}]
    world.cluster.put(NODE, {"metadata": {"name": name}, "status": {"conditions": conditions}})
    world.settle()


def test_no_node_event_shortens_the_backoff(ready_world) -> None:
    """Each attempt may bring a node, and its failure has the provisioner take it away: both are events of nodes."""
    _node(ready_world, "a")
    ready_world.edit(replicas=2)
    plan_hash, healthy = ready_world.served_hash(), _ready_uids(ready_world)
    _fail(ready_world, plan_hash)
    ready_world.rest()
    _node(ready_world, "a", heartbeat="2")
    for change in ({"name": "b"}, {"name": "a", "ready": False}, {"name": "a"}):
        _node(ready_world, **change)
    ready_world.cluster.remove(NODE, "", "b")
    ready_world.add_node("c", product="NVIDIA-H200", memory_mib=143771, gpus=8)
    ready_world.pass_time(59)
    assert ready_world.rest() == []
    assert (ready_world.deployments(), _ready_uids(ready_world)) == ({plan_hash: 1}, healthy)
    ready_world.pass_time(2)
    assert ready_world.deployments() == {plan_hash: 2}


def test_a_ready_pod_that_is_evicted_meanwhile_comes_back(failed_growth) -> None:
    plan_hash = failed_growth.served_hash()
    (pod,) = failed_growth.cluster.of(POD)
    failed_growth.cluster.remove(POD, "ml", pod["metadata"]["name"])
    failed_growth.settle()
    assert failed_growth.deployments() == {plan_hash: 1}
    (again,) = failed_growth.cluster.pods_of(failed_growth.deployment(plan_hash))
    failed_growth.cluster.make_ready(failed_growth.deployment(plan_hash))
    failed_growth.settle()
    assert again["metadata"]["uid"] != pod["metadata"]["uid"]
    assert failed_growth.condition("Available") == ("True", "Serving")


def test_failed_pods_that_are_slow_to_go_are_counted_once(ready_world) -> None:
    ready_world.edit(replicas=2)
    plan_hash = ready_world.served_hash()
    ready_world.cluster.run_controllers = lambda: None  # the controller is away
    _fail(ready_world, plan_hash)
    for _ in range(3):
        ready_world.pending = ready_world.gatherer.known_keys()
        ready_world.settle()
    assert ready_world.deployments() == {plan_hash: 1}


def test_a_container_that_recovered_has_not_failed(ready_world) -> None:
    plan_hash = ready_world.served_hash()
    (pod,) = ready_world.cluster.of(POD)
    worker = {"name": "worker", "started": True, "state": {"running": {}}, "lastState": {"terminated": ENDED}}
    ready = {"type": "Ready", "status": "True"}
    ready_world.cluster.set_pod(pod, phase="Running", podIP="10.0.0.1", conditions=[ready], containerStatuses=[worker])
    ready_world.settle()
    assert ready_world.deployments() == {plan_hash: 1}
    assert ready_world.condition("Stalled") is None


def test_the_exit_code_of_an_injected_container_is_its_own_affair(ready_world) -> None:
    ready_world.edit(replicas=2)
    plan_hash = ready_world.served_hash()
    (pod,) = _not_ready(ready_world, plan_hash)
    proxy = {"name": "proxy", "started": True, "state": {"terminated": ENDED}}
    ready_world.cluster.set_pod(pod, phase="Running", containerStatuses=[proxy, {"name": "worker", "state": {}}])
    ready_world.settle()
    assert ready_world.deployments() == {plan_hash: 2}
    assert not Pod.from_body(ready_world.cluster.objects[POD, "ml", pod["metadata"]["name"]]).started


def test_a_new_revision_that_fails_gives_its_place_back_and_is_tried_again(ready_world) -> None:
    old, healthy = ready_world.served_hash(), _ready_uids(ready_world)
    ready_world.edit(context={"maxModelLen": 1024})
    new = ready_world.revision()
    _fail(ready_world, new)
    assert ready_world.deployments() == {old: 1, new: 0}
    ready_world.pass_time(61)
    assert ready_world.deployments() == {old: 1, new: 1}
    assert _ready_uids(ready_world) == healthy
    assert ready_world.served_hash() == old
    ready_world.make_ready()
    assert ready_world.deployments() == {new: 1}
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_record_by_hand_is_due_at_once() -> None:
    for text in ('{"reason": "InvalidCheckpoint", "message": "m"}', "by hand"):
        record = FailureRecord.from_json(text)
        assert record.attempts == 1
        assert record.retry_at.year == 1970
    again = FailureRecord(record.failure, 3, record.at + timedelta(days=1), 4, "asked", True)
    assert FailureRecord.from_json(again.to_json()) == again


def test_a_record_of_the_release_before_keeps_its_count_and_its_time() -> None:
    text = json.dumps(
        {
            "reason": "InvalidCheckpoint",
            "message": "m",
            "attempts": 4,
            "at": "2026-01-01T00:00:00+00:00",
            "generation": 7,
            "places": "0123456789",
            "trying": False,
        }
    )
    record, now = FailureRecord.from_json(text), datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
    assert (record.attempts, record.retry_at) == (4, datetime(2026, 1, 1, 0, 8, tzinfo=UTC))
    assert next_record(record, seen=None, ready=0, wanted=1, asked="new", now=now) == record
