"""Many ModelServes and nodes: plans are made once per kind, users go before crowds, and at rest nothing is written.

How long it takes is measured by tests/bench/operator/operator_scale.py; here things are counted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from plans_made import Planned
from random_specs import RandomSpecs

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import MODEL_SERVE, NODE, ResourceKind
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.inventory.pools import Inventory
from modelserve_operator.inventory.supply import MOST_KINDS, MOST_PLANS, Supply
from modelserve_operator.planning.revision_builder import plan_for
from modelserve_operator.process.work_queue import BEHIND_SHARE, Key, WorkQueue

SERVES, NODES = 150, 60
PRODUCTS = ("NVIDIA-H200", "NVIDIA-H100-80GB-HBM3", "NVIDIA-L40S", "NVIDIA-A100-SXM4-80GB")
KINDS = tuple(itertools.product(("E2B", "E4B", "31B"), (8_192, 32_768)))


def _node(number: int, *, less_mib: int = 0) -> dict[str, Any]:
    accelerator = CATALOGUE[PRODUCTS[number % len(PRODUCTS)]]
    gpus = str(2 ** (number // len(PRODUCTS) % 4))
    labels = {
        "kubernetes.io/hostname": f"gpu-{number}",
        "provisioner.example/machine": str(number),  # makes a pool of every node
        "node.kubernetes.io/instance-type": f"type-{accelerator.product}-{gpus}",
        "nvidia.com/gpu.product": accelerator.product,
        "nvidia.com/gpu.memory": str(accelerator.memory_mib - less_mib),
        "nvidia.com/gpu.count": gpus,
    }
    return {
        "metadata": {"name": f"gpu-{number}", "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def _serve(number: int) -> dict[str, Any]:
    size, length = KINDS[number % len(KINDS)]
    spec = {
        "model": {"uri": f"hf://google/gemma-4-{size}-it", "servedName": f"serve-{number}"},
        "context": {"maxModelLen": length},
        "plan": {"mode": "PreviewOnly"},
        "pod": {"labels": {"team": f"team-{number}"}},
    }
    metadata = {"name": f"serve-{number}", "namespace": "ml"}
    return {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": metadata, "spec": spec}


class PromptReplanning(Replanning):
    gathering_seconds = 0.0


class Crowd:
    """A world whose events go through the operator's own queue, one worker at a time."""

    def __init__(self, world) -> None:
        self.world = world
        self.done: list[Key] = []
        self.planned = Planned(world)
        self.queue = WorkQueue()
        self.after_each: Callable[[], None] = lambda: None
        world.cluster.listener = None
        for number in range(NODES):
            world.cluster.put(NODE, _node(number))
        for number in range(SERVES):
            world.cluster.put(MODEL_SERVE, _serve(number))

    async def restart(self) -> None:
        await asyncio.to_thread(self.world.restart_operator)  # it runs a loop of its own
        self.replanning = PromptReplanning(self.world.gatherer, self.queue)
        self.world.cluster.listener = self._heard

    def _heard(self, kind: ResourceKind, body: dict[str, Any], deleted: bool) -> None:
        self.replanning.note(self.world.gatherer.hear(kind, body, deleted=deleted))

    async def _reconcile(self, key: Key) -> None:
        await self.world.reconciler.reconcile(key)
        self.done.append(key)
        self.planned.look()
        self.after_each()

    async def drain(self) -> None:
        """Run until nothing is queued, timers of the replanning included."""
        running = asyncio.create_task(self.queue.run(self._reconcile, workers=1))
        seen = -1
        while seen != len(self.done):
            seen = len(self.done)
            for _ in range(5):  # a timer of no seconds, and the reconciles it queues
                await asyncio.sleep(0)
            while self.queue.depth:  # noqa: ASYNC110 - nothing tells when a queue is empty
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def settle(self) -> None:
        self.replanning.everything()
        await self.drain()
        self.done.clear()
        self.planned.clear()
        self.world.rest()


@pytest.fixture
async def crowd(world) -> Crowd:
    made = Crowd(world)
    await made.restart()
    return made


async def test_one_plan_per_kind_and_no_write_at_rest_nor_after_a_restart(crowd: Crowd) -> None:
    crowd.replanning.everything()
    await crowd.drain()
    assert len(crowd.planned) == len(KINDS)
    writes = crowd.world.rest()
    assert sorted(writes) == sorted(
        [("patch/status", "ModelServe", f"serve-{number}") for number in range(SERVES)]
        + [("create", "Event", "PlanPreviewed")] * SERVES
    )
    hashes = {crowd.world.status(f"serve-{number}")["plan"]["hash"] for number in range(SERVES)}
    assert len(hashes) == SERVES, "the served name is part of the hash, though not of the plan's arithmetic"
    for _ in range(2):
        crowd.replanning.everything()
        await crowd.drain()
        assert crowd.world.rest() == []
        await crowd.restart()


async def test_a_node_like_others_has_nothing_planned_anew(crowd: Crowd) -> None:
    await crowd.settle()
    crowd.world.cluster.put(NODE, _node(NODES))
    crowd.world.cluster.remove(NODE, "", "gpu-0")
    await crowd.drain()
    assert len(crowd.done) == SERVES, "looked at once for both"
    assert len(crowd.planned) == 0
    assert crowd.world.rest() == []


async def test_a_user_goes_before_a_crowd(crowd: Crowd) -> None:
    await crowd.settle()
    before = {number: crowd.world.status(f"serve-{number}")["plan"] for number in range(SERVES)}
    last = Key("ml", f"serve-{SERVES - 1}")
    at = 0

    def edit() -> None:
        nonlocal at
        if len(crowd.done) == 20:
            at = len(crowd.done)
            crowd.world.cluster.change(
                MODEL_SERVE, last.name, lambda body: body["spec"].update(context={"maxModelLen": 4096})
            )

    crowd.after_each = edit
    for number in range(NODES):  # the memory of every node is found to be less
        crowd.world.cluster.put(NODE, _node(number, less_mib=1024))
    await crowd.drain()
    assert at == 20
    assert last in crowd.done[at : at + 2]
    # Twice: the event of its own status comes before the answer of that write, here as it may in a cluster.
    assert all(crowd.done.count(key) <= 2 for key in set(crowd.done) - {last}), "sixty nodes changed, it was done once"
    assert len(crowd.planned) == len(KINDS) + 1
    status = crowd.world.status(last.name)
    assert (status["observedGeneration"], status["plan"]["maxModelLen"]) == (2, 4096)
    changed = [number for number in before if crowd.world.status(f"serve-{number}")["plan"] != before[number]]
    assert len(changed) == SERVES, "the bystanders have their new plan, too"


async def test_a_crowd_goes_on_however_busy_users_are() -> None:
    queue, done, stop = WorkQueue(), [], asyncio.Event()
    for number in range(5):
        queue.add(Key("crowd", str(number)), ahead=False)
    users = itertools.count()

    async def reconcile(key: Key) -> None:
        done.append(key.namespace)
        queue.add(Key("users", str(next(users))))
        await asyncio.sleep(0)
        if done.count("crowd") == 5:
            stop.set()

    queue.add(Key("users", "first"))
    running = asyncio.create_task(queue.run(reconcile, workers=1))
    await asyncio.wait_for(stop.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert done[: 5 * BEHIND_SHARE].count("crowd") == 5
    assert done[: BEHIND_SHARE - 1] == ["users"] * (BEHIND_SHARE - 1)


async def test_the_first_rest_is_told_once_when_nothing_waits_or_runs() -> None:
    queue, done, rests = WorkQueue(), [], []

    async def reconcile(key: Key) -> None:
        await asyncio.sleep(0)
        done.append(key.name)
        if key.name == "a":
            queue.add(Key("ml", "b"))

    queue.add(Key("ml", "a"))
    running = asyncio.create_task(queue.run(reconcile, workers=3, at_first_rest=lambda: rests.append(list(done))))
    while not rests:  # noqa: ASYNC110
        await asyncio.sleep(0)
    queue.add(Key("ml", "c"))
    while "c" not in done:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rests == [["a", "b"]]


async def test_a_key_that_waits_behind_is_brought_ahead_and_not_done_twice() -> None:
    queue, done = WorkQueue(), []
    for name in "abc":
        queue.add(Key("ml", name), ahead=False)
    queue.add(Key("ml", "c"))
    queue.add(Key("ml", "c"), ahead=False)

    async def reconcile(key: Key) -> None:
        done.append(key.name)

    running = asyncio.create_task(queue.run(reconcile, workers=1))
    while queue.depth:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert done == ["c", "a", "b"]


def _supply() -> Supply:
    inventory = Inventory()
    for number in range(16):
        inventory.hear(_node(number), deleted=False)
    return Supply(pools=inventory.pools(), nodes_of=inventory.nodes_of(), idle=inventory.idle())


def test_a_kept_plan_is_the_plan_that_would_be_made(tiny_facts: ModelFacts) -> None:
    """Specs that differ in one top-level field each, so that a field missing in the key would be found."""
    kept, specs = _supply(), RandomSpecs(7)
    compared = 0
    for _ in range(10):
        base, other = specs.valid(), specs.valid()
        for field in sorted({*base, *other}):
            variant = {**base, field: other[field]} if field in other else {k: v for k, v in base.items() if k != field}
            for document in (base, variant):
                try:
                    spec = ModelServeSpec.model_validate(document)
                except ValueError:
                    continue
                found, wanted = (_plan_or_refusal(spec, tiny_facts, supply) for supply in (kept, _supply()))
                compared += isinstance(wanted, PlanStatus)
                assert found == wanted, document
    assert compared > 50


def _plan_or_refusal(spec: ModelServeSpec, facts: ModelFacts, supply: Supply) -> PlanStatus | str:
    """What is planned, or why that cannot be: of images that the model does not see."""
    try:
        return plan_for(spec, facts, supply)
    except InvalidInput as error:
        return str(error)


def test_kept_plans_are_bounded(tiny_facts: ModelFacts) -> None:
    kept = _supply()
    for zone in range(MOST_KINDS + 2):
        document = {"model": {"uri": "hf://own/model"}, "accelerators": {"nodeSelector": {"zone": str(zone)}}}
        plan = plan_for(ModelServeSpec.model_validate(document), tiny_facts, kept)
    assert [len(offered.plans) for offered in kept.offered.values()] == [1] * MOST_KINDS
    offered = list(kept.offered.values())[-1]
    (key,) = offered.plans
    for number in range(MOST_PLANS + 2):
        offered.keep((f"spec {number}", *key[1:]), plan)
    assert [name for name, *_ in offered.plans] == [f"spec {number}" for number in range(2, MOST_PLANS + 2)]


def _said_or_proposed(world, name: str) -> bool:
    return world.condition("PoolsGone", name) == ("True", "PoolsGone") or "proposedPlan" in world.status(name)


async def test_a_lost_gpu_type_is_said_of_all_whom_it_concerns_and_users_go_first(crowd: Crowd) -> None:
    """How long it takes with 2,000 nodes is measured by tests/bench/operator/lost_accelerator.py."""
    names = [f"serve-{number}" for number in range(24)]
    for number, name in enumerate(names):
        plan = {"products": ["NVIDIA-L40S"]} if number % 3 == 0 else None

        def commit(body: dict[str, Any], plan: Any = plan) -> None:
            del body["spec"]["plan"]
            body["spec"] |= {"accelerators": plan} if plan else {}

        crowd.world.cluster.change(MODEL_SERVE, name, commit)
    await crowd.settle()
    before = {name: crowd.world.status(name) for name in names}
    lost = before[names[1]]["plan"]["accelerator"]
    concerned = {name for name in names if before[name]["plan"]["accelerator"] == lost}
    others = sorted(set(names) - concerned)
    assert (len(concerned), len(others)) == (16, 8), "one GPU type of several"
    user, at = Key("ml", others[-1]), 0

    def edit() -> None:
        nonlocal at
        if len(crowd.done) == 20:
            at = len(crowd.done)
            crowd.world.cluster.change(MODEL_SERVE, user.name, lambda body: body["spec"].update(replicas=2))

    crowd.after_each = edit
    for number in range(NODES):
        if PRODUCTS[number % len(PRODUCTS)] == lost:
            crowd.world.cluster.remove(NODE, "", f"gpu-{number}")
    await crowd.drain()
    assert user in crowd.done[at : at + 2]
    assert [name for name in concerned if not _said_or_proposed(crowd.world, name)] == []
    assert all(crowd.world.status(name)["revision"] == before[name]["revision"] for name in names), "only proposed"
    assert [name for name in others if crowd.world.condition("PoolsGone", name) is not None] == []
