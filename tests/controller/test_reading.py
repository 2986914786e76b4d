"""How the operator reads: workers at once, claims now and then, plans once per shape and supply, resyncs on time; and
the statuses that it writes to what it read."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from plans_made import Planned

from modelserve_operator.cluster.kinds import CLAIM, DEPLOYMENT, MODEL_SERVE, NODE, POD, WATCHED, ResourceKind
from modelserve_operator.cluster.kube import WorkerUnreachableError
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.gathering.watchdog import Watchdog
from modelserve_operator.process.work_queue import Key, WorkQueue

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}


@pytest.fixture
def four(ready_world):
    """`tiny` with four ready workers, of which one has answered; the others are not in `worker_plans`."""
    (deployment,) = ready_world.cluster.of(DEPLOYMENT)
    for _ in range(3):
        ready_world.cluster._make_pod(deployment, {})
    for pod in ready_world.cluster.of(POD)[-3:]:
        conditions = [{"type": "Ready", "status": "True"}]
        ready_world.cluster.set_pod(pod, phase="Running", podIP="10.0.0.9", conditions=conditions)
    return ready_world


async def test_workers_that_hang_are_asked_at_once_and_no_reconcile_waits_for_them(
    four,
) -> None:
    under_way, asked, answer = 0, 0, asyncio.Event()

    async def hang(request: Any) -> None:
        nonlocal under_way, asked
        if request.verb == "read_worker":
            under_way, asked = under_way + 1, asked + 1
            await answer.wait()
            under_way -= 1
            raise WorkerUnreachableError(request.name)

    four.cluster.asked = hang
    observed = await four.gatherer.observe(Key("ml", "tiny"))
    assert (under_way, asked) == (3, 3)
    assert len(observed.reports) == 1, "what the fourth one said is known"
    four.now += timedelta(seconds=60)
    await four.gatherer.observe(Key("ml", "tiny"))
    assert (under_way, asked) == (3, 3), "each of them is asked once"
    four.pending.clear()
    answer.set()
    async with asyncio.timeout(60):
        while not four.pending:  # noqa: ASYNC110 - nothing tells when it changes
            await asyncio.sleep(0.001)
    assert four.pending == {Key("ml", "tiny")}, "and is looked at again when they are over"
    await four.gatherer.observe(Key("ml", "tiny"))
    assert asked == 3
    four.now += timedelta(seconds=5)
    await four.gatherer.observe(Key("ml", "tiny"))
    await asyncio.sleep(0)
    assert asked == 6


def test_a_worker_that_cannot_be_asked_is_asked_less_and_less_and_said(four, caplog: pytest.LogCaptureFixture) -> None:
    """A default-deny policy in a tenant's namespace gives this for every worker, for ever."""
    four.edit(replicas=4)
    asked: list[datetime] = []
    four.cluster.asked = lambda request: asked.append(four.now) if request.verb == "read_worker" else None
    assert four.condition("Ready") == ("True", "RolledOut")
    assert "cannot" not in four.message("WorkersReady")
    (key,) = four.due
    for _ in range(11):
        four.pass_time((four.due[key] - four.now).total_seconds())
    gaps = [round((later - earlier).total_seconds()) for earlier, later in itertools.pairwise(sorted(set(asked)))]
    assert gaps[:8] == [10, 20, 40, 80, 160, 300, 300, 300]
    assert caplog.text.count("does not report its plan") == 3, "once for each worker"
    assert "What 3 of them measured is not known" in four.message("WorkersReady")
    assert four.condition("Ready") == ("True", "RolledOut")
    four.make_ready()
    four.pass_time(300)
    assert "not known" not in four.message("WorkersReady")


def test_a_claim_is_read_now_and_then(ready_world) -> None:
    read: list[ResourceKind] = []
    ready_world.cluster.asked = lambda request: read.append(request.kind) if request.verb == "get" else None
    for replicas in (2, 3, 4):
        ready_world.edit(replicas=replicas)
    assert CLAIM not in read
    ready_world.pass_time(600)
    ready_world.edit(replicas=1)
    assert read.count(CLAIM) == 1


def test_equal_shapes_are_planned_once_and_again_when_the_supply_changes(
    world,
) -> None:
    planned = Planned(world)
    world.after_each = planned.look
    world.add_node("a", **H200)
    for number in range(5):
        world.create({"model": MODEL, "plan": {"mode": "PreviewOnly"}}, name=f"m{number}")
    assert len(planned) == 1
    world.cluster.put(NODE, {"metadata": {"name": "cpu", "labels": {"zone": "1"}}})
    world.settle()
    assert len(planned) == 1
    world.add_node("b", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    assert len(planned) == 2
    candidates = world.status("m3")["plan"]["candidates"]
    assert {each["accelerator"] for each in candidates} == {"NVIDIA-H200", "NVIDIA-L4"}


async def test_a_resync_does_not_wait_for_a_check(world) -> None:
    world.cluster.listener = None
    world.cluster.put(MODEL_SERVE, {"metadata": {"name": "m", "namespace": "ml"}, "spec": {}})
    await world.gatherer.relist()  # the resync will find nothing new
    world.gatherer.heard_version = dict.fromkeys(WATCHED, 10**9)
    queued = asyncio.Event()

    class Told(WorkQueue):
        def add(self, key: Key, *, ahead: bool = True) -> None:
            queued.set()

    replanning = Replanning(world.gatherer, Told())
    running = asyncio.create_task(Watchdog(world.gatherer, replanning, interval=3600, resync=0.01).run())
    await asyncio.wait_for(queued.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_resync_is_never_sooner_than_it_is_due(world) -> None:
    """However slow the machine is: so many cannot have been due in the time that has passed."""
    times: list[float] = []
    four = asyncio.Event()

    class Noted(Replanning):
        def everything(self) -> None:
            times.append(time.monotonic())
            if len(times) == 4:
                four.set()

    class Quick(Watchdog):
        grace_seconds = 0.0

    world.gatherer.heard_version = dict.fromkeys(WATCHED, 10**9)
    began = time.monotonic()
    watchdog = Quick(world.gatherer, Noted(world.gatherer, WorkQueue()), interval=3600, resync=0.05)
    running = asyncio.create_task(watchdog.run())
    await asyncio.wait_for(four.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    due = [began + 0.05 * number for number in range(1, 5)]
    assert all(at >= earliest for at, earliest in zip(times, due, strict=False))


def test_a_status_is_written_to_the_spec_that_it_was_made_from(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "PreviewOnly"}}, name="bystander")
    bystander = world.status("bystander")

    def overtake(request: Any) -> None:
        if request.verb == "json_patch":
            world.cluster.asked = None
            edited = {"context": {"maxModelLen": 4096}}
            world.cluster.change(MODEL_SERVE, "big", lambda body: body["spec"].update(edited))

    world.cluster.asked = overtake
    world.create({"model": MODEL, "plan": {"mode": "PreviewOnly"}}, name="big")
    status = world.status("big")
    assert (status["observedGeneration"], status["maxModelLen"]) == (2, 4096)
    told = [event["involvedObject"]["name"] for event in world.cluster.events if event["reason"] == "PlanPreviewed"]
    assert told == ["bystander", "big"], "what was not written was not announced"
    assert world.status("bystander") == bystander


def test_conditions_of_others_stay_and_are_no_reason_to_write(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "PreviewOnly"}}, name="big")
    foreign = {"type": "example.com/Checked", "status": "True", "reason": "Checked", "message": "by hand"}
    world.cluster.change(MODEL_SERVE, "big", lambda body: body["status"]["conditions"].insert(0, foreign))
    world.settle()
    world.edit("big", context={"maxModelLen": 4096})
    assert foreign in world.status("big")["conditions"]
    assert world.status("big")["maxModelLen"] == 4096
    world.rest()
    world.pending = world.gatherer.known_keys()
    world.settle()
    assert world.rest() == []
