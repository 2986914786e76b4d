"""When another worker image takes over: proposed, with an edit, or in turns over all ModelServes.

MODELSERVE_FLEET=200 moves more of them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import random
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONTROLLER_REVISION, DEPLOYMENT, MODEL_SERVE, POD
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.process.metrics import REGISTRY
from modelserve_operator.process.work_queue import Key
from modelserve_operator.rollout.fleet import Limits, Member, members, turn

FLEET = int(os.environ.get("MODELSERVE_FLEET", "12"))
NEWER = "worker:0.2.7"
BIG = {"model": {"uri": "hf://google/gemma-4-E2B-it"}, "pod": {"labels": {"team": "a"}}}


def _upgrade(world, **settings: Any) -> None:
    world.settings = world.settings.model_copy(update={"worker_image": NEWER, **settings})
    world.restart_operator()
    world.settle()


def _image(deployment: dict[str, Any]) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


@pytest.fixture
def served(world):
    """Ready on one GPU node, with room for as many as a test wants."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create(BIG, name="big")
    world.make_ready()
    return world


def _waits(world, kind: str) -> float | None:
    series = {"namespace": "ml", "name": "big", "kind": kind}
    return REGISTRY.get_sample_value("modelserve_proposal_waits", series)


def test_proposed_waits_and_says_what(served) -> None:
    pods = {pod["metadata"]["uid"] for pod in served.cluster.of(POD)}
    assert "waits" not in served.status("big")
    _upgrade(served)
    served.edit("big", rollout={"maxSurge": 2})
    assert served.status("big")["waits"] == "Worker"
    assert (_waits(served, "Worker"), _waits(served, "Plan")) == (1, 0)
    assert {pod["metadata"]["uid"] for pod in served.cluster.of(POD)} == pods
    served.add_node("a", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    assert served.status("big")["waits"] == "Plan"
    assert (_waits(served, "Worker"), _waits(served, "Plan")) == (0, 1)


@pytest.mark.parametrize(("policy", "image"), [("Proposed", "worker:test"), ("OnEdit", NEWER)])
def test_an_edit_of_pods_brings_the_newer_worker_where_that_is_the_policy(served, policy: str, image: str) -> None:
    _upgrade(served)
    served.edit("big", rollout={"workerPolicy": policy})
    assert [_image(each) for each in served.cluster.of(DEPLOYMENT)] == ["worker:test"], "this edit makes no new pods"
    served.edit("big", pod={"labels": {"team": "b"}})
    served.make_ready()
    assert [_image(each) for each in served.cluster.of(DEPLOYMENT)] == [image]


def test_rolling_changes_image_and_dialect_only(served) -> None:
    (old,) = served.deployments()
    before = copy.deepcopy(served.cluster.objects[CONTROLLER_REVISION, "ml", f"big-{old}"]["data"])
    plan = served.shown_plan("big")
    _upgrade(served, worker_policy="Rolling")
    served.add_node("b", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    served.make_ready()
    (new,) = served.deployments()
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    after = served.cluster.objects[CONTROLLER_REVISION, "ml", f"big-{new}"]["data"]
    text = json.dumps(before["template"]).replace(old, new).replace("worker:test", NEWER)
    assert after["template"] == json.loads(text)
    assert after["engine"] == before["engine"]
    assert after["worker"] == {"image": NEWER, "release": "0.2.7"}
    assert (after["inputs"], after["plan"]) == (before["inputs"], before["plan"])
    assert served.shown_plan("big") == plan
    assert "waits" not in served.status("big")
    served.rest()
    served.restart_operator()
    served.settle()
    assert served.rest() == []


def test_an_approval_that_stands_in_git_does_not_move_it_back(served) -> None:
    approved = served.status("big")["plan"]["hash"]
    served.edit("big", plan={"mode": "Manual", "approvedHash": approved})
    _upgrade(served, worker_policy="Rolling")
    for _ in range(3):
        served.make_ready()
        served.pass_time(60)
    assert [_image(each) for each in served.cluster.of(DEPLOYMENT)] == [NEWER]
    assert served.condition("Ready", "big") == ("True", "RolledOut")


@pytest.mark.parametrize("fields", [{"image": "mine:1"}, {"plan": {"mode": "PreviewOnly"}}, {"plan": "pinned"}])
def test_rolling_leaves_alone_who_says_so(served, fields: dict[str, Any]) -> None:
    if fields.get("plan") == "pinned":
        fields = {"plan": {"revision": served.status("big")["revision"]}}
    served.edit("big", **fields)
    served.make_ready()
    before = [_image(each) for each in served.cluster.of(DEPLOYMENT)]
    _upgrade(served, worker_policy="Rolling")
    served.make_ready()
    assert [_image(each) for each in served.cluster.of(DEPLOYMENT)] == before


def test_setting_the_image_back_moves_them_back(served) -> None:
    _upgrade(served, worker_policy="Rolling")
    served.make_ready()
    served.settings = served.settings.model_copy(update={"worker_image": "worker:test"})
    served.restart_operator()
    served.settle()
    served.make_ready()
    assert [_image(each) for each in served.cluster.of(DEPLOYMENT)] == ["worker:test"]
    assert served.condition("Ready", "big") == ("True", "RolledOut")


# --- turns ---------------------------------------------------------------------------------------------------------


def test_what_a_modelserve_runs_is_said_by_its_highest_revision_in_whatever_order_they_are_listed() -> None:
    def revision(number: int, owner: str = "u") -> dict[str, Any]:
        metadata = {
            "name": f"big-{number}", "namespace": "ml", "labels": {labels.NAME: "big"},
            "ownerReferences": [{"uid": owner}],
        }  # fmt: skip
        return {"metadata": metadata, "revision": number, "data": {"worker": {"image": f"worker:{number}"}}}

    serve = {"metadata": {"name": "big", "namespace": "ml", "uid": "u"}}
    for listed in itertools.permutations(
        [revision(1), revision(2), revision(3), revision(4, owner="of the one before")]
    ):
        found = members([serve], listed)
        assert {key.name: member.image for key, member in found.items()} == {"big": "worker:3"}


def _member(image: str = NEWER, *, moved: bool = True, settled: bool = False, stalled: str | None = None) -> Member:
    return Member(image, moved, settled, serves=settled, stalled=stalled is not None, fails=stalled)


@pytest.mark.parametrize(
    ("fleet", "admitted", "words"),
    [
        ([], [], None),
        ([_member("worker:test", settled=True)], [], None),
        ([_member()], [], "one moves to worker:0.2.7 before all others"),
        ([], ["x"], "one moves to worker:0.2.7 before all others"),
        ([_member(settled=True), _member()], [], None),
        ([_member(settled=True), _member()], ["x"], "2 at a time move to worker:0.2.7"),
        ([_member(settled=True), _member()], ["m1"], None),
        ([_member(settled=True, moved=False), _member(moved=False), _member(moved=False)], [], None),
        ([_member(settled=True), _member(stalled="CrashLoop")], [], "no more .* fails in ml/m1 .CrashLoop."),
        ([_member("worker:older", stalled="CrashLoop")], [], None),
    ],
)
def test_whose_turn_it_is(fleet: list[Member], admitted: list[str], words: str | None) -> None:
    known = {Key("ml", f"m{place}"): each for place, each in enumerate(fleet)}
    limits = Limits(budget=2, failures=1)
    others = [Key("ml", each) for each in admitted]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    waits = turn(known, key=Key("ml", "me"), image=NEWER, admitted=others, limits=limits, now=now)
    assert (waits is None) is (words is None)
    if words is not None:
        assert waits is not None
        assert re.search(words, waits.why)


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(each["status"] == "True" for each in pod["status"].get("conditions", ()))


class Killed(BaseException):
    """The operator's process ended in the middle of a write."""


class FleetOf:
    """Many ModelServes in one cluster; the operator may be killed at any write."""

    def __init__(self, world, size: int) -> None:
        self.world = world
        self.most = 0  # that were on their way at a time
        world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
        for number in range(size):
            body = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "spec": copy.deepcopy(BIG)}
            world.cluster.put(MODEL_SERVE, {**body, "metadata": {"name": f"m{number}", "namespace": "ml"}})
        self.work()
        self.make_ready()

    def work(self) -> None:
        """Until nothing is left to do, several reconciles at a time."""

        async def all_of(keys: list[Key]) -> None:
            await asyncio.gather(*map(self.world.reconciler.reconcile, keys))

        for _ in range(200):
            keys, self.world.pending = sorted(self.world.pending), set()
            if not keys:
                return
            asyncio.run(all_of(keys))
            self.world.cluster.run_controllers()
            self.most = max(self.most, len(self.on_their_way()))
        raise AssertionError("the operator does not come to rest")

    def look_again(self) -> None:
        """Those that wait for their turn look again after a while."""
        self.world.pending |= self.world.gatherer.known_keys()
        self.work()

    def make_ready(self, *, image: str | None = None) -> None:
        """Workers get ready; of an `image` alone where one is named."""
        for deployment in self.world.cluster.of(DEPLOYMENT):
            if image in (None, _image(deployment)):
                self.world.cluster.make_ready(deployment)
        self.work()

    def on_their_way(self) -> set[str]:
        """Those whose newest revision is not ready."""
        found = set()
        for deployment in self.world.cluster.of(DEPLOYMENT):
            if _image(deployment) != "worker:test" and not all(map(_is_ready, self.world.cluster.pods_of(deployment))):
                found.add(labels.label_of(deployment, labels.NAME) or "")
        return found

    def ready_workers(self) -> dict[str, int]:
        """By ModelServe, of all revisions."""
        found: dict[str, int] = {}
        for deployment in self.world.cluster.of(DEPLOYMENT):
            name = labels.label_of(deployment, labels.NAME) or ""
            pods = self.world.cluster.pods_of(deployment)
            found[name] = found.get(name, 0) + sum(map(_is_ready, pods))
        return found

    def images(self) -> list[str]:
        return [_image(each) for each in self.world.cluster.of(DEPLOYMENT)]

    def restart(self, **settings: Any) -> None:
        self.world.settings = self.world.settings.model_copy(update=settings)
        self.world.restart_operator()


def test_a_fleet_moves_in_its_budget_whenever_the_operator_is_killed(world) -> None:
    fleet, chance = FleetOf(world, FLEET), random.Random(7)
    assert set(fleet.ready_workers().values()) == {1}
    fleet.restart(worker_image=NEWER, worker_policy="Rolling", rolling_budget=5)
    kills, until = 10, chance.randrange(1, 12)

    def killed(request: Any) -> None:
        nonlocal kills, until
        until -= request.verb in ("apply", "json_patch")
        if kills and until <= 0:
            kills, until = kills - 1, chance.randrange(1, 12)
            raise Killed

    world.cluster.answered = killed
    for _ in range(4 * FLEET + 40):
        try:
            fleet.make_ready()
            fleet.look_again()
        except Killed:
            world.restart_operator()
        assert min(fleet.ready_workers().values()) >= 1, "no ModelServe is below what it wants"
        assert len(fleet.on_their_way()) <= 5
        if set(fleet.images()) == {NEWER} and not fleet.on_their_way():
            break
    assert kills == 0
    assert fleet.images() == [NEWER] * FLEET
    assert 2 <= fleet.most <= 5, "several at a time, and never more"
    assert {world.condition("Ready", f"m{number}") for number in range(FLEET)} == {("True", "RolledOut")}
    assert len(world.cluster.of(CONTROLLER_REVISION)) == 2 * FLEET, "one move each"


def test_an_image_that_fails_halts_after_the_first(world) -> None:
    fleet = FleetOf(world, 6)
    fleet.restart(worker_image=NEWER, worker_policy="Rolling", rolling_budget=5)
    fleet.look_again()
    assert fleet.images().count(NEWER) == 1, "the first goes alone"
    (first,) = fleet.on_their_way()
    (new,) = [each for each in world.cluster.of(DEPLOYMENT) if _image(each) == NEWER]
    (pod,) = world.cluster.pods_of(new)
    state = {"waiting": {"reason": "CrashLoopBackOff"}, "lastState": {}}
    ended = {"terminated": {"exitCode": 1, "message": "boom"}}
    containers = [{"name": "worker", "state": state, "lastState": ended, "restartCount": 9}]
    world.cluster.set_pod(pod, phase="Running", containerStatuses=containers)
    fleet.work()
    assert world.condition("Stalled", first) == ("True", "CrashLoop")
    for _ in range(3):
        fleet.look_again()
    assert fleet.images().count(NEWER) == 1
    assert set(fleet.ready_workers().values()) == {1}, "nobody has fewer workers than before"
    (other, *_) = {f"m{number}" for number in range(6)} - {first}
    assert f"it fails in ml/{first} (CrashLoop)" in world.message("Planned", other)
    assert world.condition("Ready", other) == ("True", "RolledOut")
    fleet.restart(worker_image="worker:0.1.8")
    for _ in range(20):
        fleet.make_ready(image="worker:0.1.8")
        fleet.look_again()
    assert fleet.images() == ["worker:0.1.8"] * 6, "a better image moves them all, the one that failed too"


def test_a_move_that_could_not_be_written_holds_its_place_and_nobody_elses(world) -> None:
    fleet = FleetOf(world, 3)

    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("apply", CONTROLLER_REVISION):
            raise KubeError(500, "etcd is gone")

    world.cluster.asked = refuse
    fleet.restart(worker_image=NEWER, worker_policy="Rolling")
    for key in sorted(world.pending):
        try:
            asyncio.run(world.reconciler.reconcile(key))
        except KubeError:
            continue
    world.cluster.asked = None
    for _ in range(10):
        fleet.look_again()
        fleet.make_ready()
    assert fleet.images() == [NEWER] * 3
