"""Nobody's newer worker waits for what is amiss in another namespace, unless it is the worker. No names are told."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONTROLLER_REVISION, DEPLOYMENT, LEASE, MODEL_SERVE, POD
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.process.metrics import REGISTRY
from modelserve_operator.process.work_queue import Key
from modelserve_operator.rollout.fleet import Limits, Member, turn

NEWER, LIMITS = "worker:0.2.7", Limits(budget=1, failures=2)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BAD, GOOD, OTHER = Key("bad", "x"), Key("good", "y"), Key("other", "z")
NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
CRASHES = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "worker",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "boom"}},
            "restartCount": 9,
        }
    ],
}


def _without_room(minutes: float) -> Member:
    return Member(NEWER, True, no_room_since=NOW - timedelta(minutes=minutes))


STALLED, MOVING = Member(NEWER, True, stalled=True), Member(NEWER, True)
FAILING = Member(NEWER, True, stalled=True, fails="CrashLoop")


@pytest.mark.parametrize(
    ("fleet", "key", "words"),
    [
        ({BAD: STALLED}, GOOD, None),
        ({BAD: FAILING}, GOOD, None),
        ({BAD: FAILING}, Key("bad", "w"), "no more ModelServes of this namespace .* fails in bad/x .CrashLoop."),
        ({BAD: FAILING, Key("bad", "w"): FAILING}, GOOD, None),
        ({BAD: FAILING, OTHER: FAILING}, GOOD, "no more ModelServes move .* of other namespaces .CrashLoop."),
        ({BAD: MOVING}, GOOD, "one moves"),
        ({BAD: _without_room(1)}, GOOD, None),
        ({BAD: _without_room(1)}, Key("bad", "w"), "another ModelServe of this namespace .* no room"),
        ({BAD: _without_room(10)}, Key("bad", "w"), None),
        ({BAD: _without_room(1), OTHER: _without_room(1)}, GOOD, "one moves"),
        ({BAD: _without_room(11), OTHER: _without_room(1)}, GOOD, None),
        ({BAD: _without_room(1), OTHER: MOVING}, GOOD, "one moves"),
    ],
)
def test_whose_turn_it_is_among_tenants(fleet: dict[Key, Member], key: Key, words: str | None) -> None:
    waits = turn(fleet, key=key, image=NEWER, admitted=(), limits=LIMITS, now=NOW)
    assert (waits is None) is (words is None)
    assert waits is None or re.search(words or "", waits.why)


class Tenants:
    """ModelServes of several namespaces, ready, before a newer worker comes by itself."""

    def __init__(self, world, *keys: Key) -> None:
        self.world = world
        world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
        lease = {"metadata": {"name": "modelserve", "namespace": world.settings.namespace}, "spec": {}}
        world.cluster.put(LEASE, lease)
        for key in keys:
            body = {
                "apiVersion": "serving.modelserve.dev/v1alpha1",
                "kind": "ModelServe",
                "metadata": {"name": key.name, "namespace": key.namespace},
                "spec": {"model": {"uri": "hf://google/gemma-4-E2B-it"}},
            }
            world.cluster.put(MODEL_SERVE, body)
        world.settle()
        world.make_ready()

    def upgrade(self) -> None:
        more = {"worker_image": NEWER, "worker_policy": "Rolling", "lease_name": "modelserve"}
        self.world.settings = self.world.settings.model_copy(update=more)
        self.world.restart_operator()
        self.world.settle()

    def edit(self, key: Key, **fields: Any) -> None:
        self.world.cluster.change(
            MODEL_SERVE, key.name, lambda body: body["spec"].update(fields), namespace=key.namespace
        )
        self.world.settle()

    def deployments(self, key: Key) -> dict[str, dict[str, Any]]:
        """By image."""
        found = [each for each in self.world.cluster.of(DEPLOYMENT) if _key(each) == key]
        return {each["spec"]["template"]["spec"]["containers"][0]["image"]: each for each in found}

    def on_newer(self) -> set[Key]:
        return {_key(each) for each in self.world.cluster.of(DEPLOYMENT) if NEWER in json.dumps(each["spec"])}

    def set_new_pod(self, key: Key, **status: Any) -> None:
        (pod,) = self.world.cluster.pods_of(self.deployments(key)[NEWER])
        self.world.cluster.set_pod(pod, **copy.deepcopy(status))
        self.world.settle()

    def make_ready(self, key: Key) -> None:
        for each in self.deployments(key).values():
            self.world.cluster.make_ready(each)
        self.world.settle()

    def ready(self, key: Key) -> set[str]:
        """uids of ready pods."""
        pods = [pod for pod in self.world.cluster.of(POD) if _key(pod) == key]
        return {pod["metadata"]["uid"] for pod in pods if Pod.from_body(pod).ready}

    def condition(self, key: Key, kind: str) -> dict[str, Any]:
        status = self.world.cluster.objects[MODEL_SERVE, key.namespace, key.name]["status"]
        return next((each for each in status["conditions"] if each["type"] == kind), {})

    def told_to(self, namespace: str) -> str:
        """Everything that is written where a tenant can read it."""
        objects = [body for (_, space, _), body in self.world.cluster.objects.items() if space == namespace]
        events = [each for each in self.world.cluster.events if each["metadata"]["namespace"] == namespace]
        return json.dumps([objects, events])

    def own_events(self) -> list[str]:
        """Messages about the operator itself."""
        return [each["message"] for each in self.world.cluster.events if each["involvedObject"]["kind"] == "Lease"]


def _key(body: dict[str, Any]) -> Key:
    return Key(body["metadata"]["namespace"], labels.label_of(body, labels.NAME) or "")


def _first(tenants: Tenants) -> tuple[Key, Key]:
    """The one that has moved alone, and another one that waits, of another namespace."""
    (first,) = tenants.on_newer()
    return first, next(each for each in (BAD, GOOD) if each != first)


@pytest.fixture
def tenants(world) -> Tenants:
    return Tenants(world, BAD, GOOD)


@pytest.mark.parametrize(
    "typo",
    [{"context": {"maxModelLen": -1}}, {"plan": {"revision": "no-such-one"}}, {"gateway": {"parentRefs": []}}],
    ids=["out of bounds", "unknown pin", "empty"],
)
def test_a_typo_in_one_namespace_stops_nobody_elses_move(tenants: Tenants, typo: dict[str, Any]) -> None:
    tenants.upgrade()
    bad, good = _first(tenants)
    kept = tenants.ready(bad)
    tenants.edit(bad, **typo)
    assert tenants.condition(bad, "Stalled")["reason"] in ("InvalidSpec", "RevisionUnknown")
    tenants.world.pass_time(16)
    assert good in tenants.on_newer()
    tenants.make_ready(good)
    assert tenants.condition(good, "Ready")["reason"] == "RolledOut"
    assert kept <= tenants.ready(bad), "the one at fault keeps its workers"
    assert tenants.own_events() == []


def test_a_failure_in_one_namespace_has_another_try_and_names_are_kept(tenants: Tenants) -> None:
    tenants.upgrade()
    bad, good = _first(tenants)
    kept, served = tenants.ready(bad), tenants.ready(good)
    tenants.set_new_pod(bad, **CRASHES)
    assert tenants.condition(bad, "Stalled")["reason"] == "CrashLoop"
    tenants.world.pass_time(16)
    assert good in tenants.on_newer()
    assert served <= tenants.ready(good)
    tenants.make_ready(good)
    assert tenants.condition(good, "Ready")["reason"] == "RolledOut"
    assert tenants.ready(bad) == kept
    assert f"{bad.namespace}/{bad.name}" not in tenants.told_to(good.namespace)


def test_an_image_that_fails_in_two_namespaces_halts_and_administrators_are_told(world) -> None:
    tenants = Tenants(world, BAD, GOOD, OTHER)
    before = {key: tenants.ready(key) for key in (BAD, GOOD, OTHER)}
    tenants.upgrade()
    for _ in range(2):
        (newest,) = {key for key in tenants.on_newer() if not tenants.condition(key, "Stalled")}
        tenants.set_new_pod(newest, **CRASHES)
        world.pass_time(16)
    (waits,) = {BAD, GOOD, OTHER} - tenants.on_newer()
    for _ in range(5):
        world.pass_time(16)
    assert waits not in tenants.on_newer()
    assert {key: tenants.ready(key) for key in before} == before, "nobody has lost a worker"
    failed = sorted(f"{key.namespace}/{key.name}" for key in tenants.on_newer())
    assert not any(name in tenants.told_to(waits.namespace) for name in failed)
    assert "it fails in ModelServes of other namespaces (CrashLoop)" in tenants.condition(waits, "Planned")["message"]
    (event,) = tenants.own_events()
    assert f"fails in {failed[0]} (CrashLoop), {failed[1]} (CrashLoop): no more ModelServes move to it" in event
    (about,) = [each for each in world.cluster.events if each["involvedObject"]["kind"] == "Lease"]
    assert (about["reason"], about["type"]) == ("RolloutHalted", "Warning")
    assert (
        about["involvedObject"]["uid"]
        == world.cluster.objects[LEASE, "modelserve-system", "modelserve"]["metadata"]["uid"]
    )
    assert REGISTRY.get_sample_value("modelserve_operator_halted_moves") == 1
    for key in tenants.on_newer():
        tenants.make_ready(key)
    world.pass_time(16)
    assert waits in tenants.on_newer(), "it runs after all"
    assert REGISTRY.get_sample_value("modelserve_operator_halted_moves") == 0


def test_who_has_no_room_keeps_nobody_of_another_namespace_waiting(tenants: Tenants) -> None:
    tenants.upgrade()
    full, good = _first(tenants)
    kept = tenants.ready(full)
    tenants.set_new_pod(full, phase="Pending", conditions=[NO_ROOM])
    assert tenants.condition(full, "CapacityAvailable")["reason"] == "NoSurgeCapacity"
    tenants.world.pass_time(16)
    assert good in tenants.on_newer()
    tenants.make_ready(good)
    assert tenants.condition(good, "Ready")["reason"] == "RolledOut"
    assert tenants.ready(full) == kept
    tenants.make_ready(full)
    assert tenants.condition(full, "Ready")["reason"] == "RolledOut", "it moves once there is room"


def test_what_did_not_run_before_says_nothing_of_the_image(world) -> None:
    tenants = Tenants(world, BAD, GOOD)
    for each in tenants.deployments(BAD).values():
        for pod in world.cluster.pods_of(each):
            world.cluster.set_pod(pod, **copy.deepcopy(CRASHES))
    world.settle()
    assert tenants.condition(BAD, "Stalled")["reason"] == "CrashLoop"
    world.settings = world.settings.model_copy(update={"rolling_failures": 1})
    tenants.upgrade()
    assert BAD in tenants.on_newer(), "a newer worker may be what mends it"
    tenants.set_new_pod(BAD, **CRASHES)
    world.pass_time(16)
    assert GOOD in tenants.on_newer()
    (moved,) = [
        each
        for each in world.cluster.of(CONTROLLER_REVISION)
        if each["metadata"]["namespace"] == "bad" and each["data"]["movedFrom"]
    ]
    assert moved["data"]["movedFromReady"] is False


def test_one_that_is_being_deleted_holds_no_turn(tenants: Tenants) -> None:
    tenants.upgrade()
    going, good = _first(tenants)
    tenants.world.cluster.change(
        MODEL_SERVE,
        going.name,
        lambda body: body["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["a.b/c"]),
        namespace=going.namespace,
    )
    tenants.world.settle()
    tenants.world.pass_time(16)
    assert good in tenants.on_newer()
