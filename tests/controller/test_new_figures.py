"""What a release knows better of a card, and what nodes say of their memory, is for plans to come."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.planning import evaluation
from modelserve.sizing import memory
from modelserve.units import MIB
from modelserve_operator.cluster.kinds import DEPLOYMENT, NODE

INT4 = {"uri": "hf://google/gemma-4-31B-it-qat-w4a16-ct"}
L4 = {"product": "NVIDIA-L4", "memory_mib": 23_034, "gpus": 2}


def _node(world: Any, name: str, **sizes: str) -> None:
    if name not in {each["metadata"]["name"] for each in world.cluster.of(NODE)}:
        world.add_node(name, **L4)
    world.cluster.change(NODE, name, lambda body: body["status"]["allocatable"].update(sizes))
    world.settle()


def test_a_plan_of_older_figures_stays_and_the_newer_one_is_proposed(world, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(memory, "context_bytes", lambda _: 704 * MIB)
        older.setattr(memory, "communicator_bytes", lambda *_: 896 * MIB)
        evaluation._predicted.cache_clear()
        world.add_node("a", **L4)
        world.create(
            {"model": INT4, "parallelism": {"tensor": 2}, "kvCache": {"gpuMemoryUtilization": "0.65"}}, name="big"
        )
        world.settle()  # no worker has measured anything
    evaluation._predicted.cache_clear()
    before, running = world.status("big"), world.cluster.of(DEPLOYMENT)
    assert before.get("proposedPlan") is None
    world.restart_operator()
    world.settle()
    after = world.status("big")
    assert (after["plan"], after["revision"]) == (before["plan"], before["revision"])
    assert world.cluster.of(DEPLOYMENT) == running, "no pod is touched"
    proposed = after["proposedPlan"]
    assert proposed["maxModelLen"] > after["plan"]["maxModelLen"]
    assert proposed["hash"] != after["plan"]["hash"]


def test_a_node_that_shrinks_ends_no_plan_that_runs(world) -> None:
    _node(world, "a", memory="62Gi", cpu="16")
    world.create({"model": INT4, "parallelism": {"tensor": 2}}, name="big")
    world.make_ready()
    before, running = world.status("big"), world.cluster.of(DEPLOYMENT)
    _node(world, "a", memory="4Gi", cpu="1")
    after = world.status("big")
    assert (after["plan"]["hash"], after["revision"]) == (before["plan"]["hash"], before["revision"])
    assert world.cluster.of(DEPLOYMENT) == running
    assert world.condition("Ready", "big") == ("True", "RolledOut")


def test_what_no_node_can_hold_is_refused_with_the_field_that_would_help(world) -> None:
    _node(world, "a", memory="24Gi", cpu="16")
    spec = {"model": INT4, "parallelism": {"tensor": 2}, "kvCache": {"hostMemory": "10Ti"}}
    world.create(spec, name="big")
    world.settle()
    assert world.condition("Planned", "big") == ("False", "DoesNotFit")
    said = world.message("Planned", "big")
    assert "(10,240.00 GiB of it kvCache.hostMemory)" in said
    assert "fits with kvCache.hostMemory 13Gi" in said
    world.rest()
    for kib in range(8):
        _node(world, "a", memory=f"{24 * 1024 * 1024 + kib}Ki", cpu="16")
    assert world.rest() == [], "a few KiB are no news"
    _node(world, "b", memory="12Ti", cpu="16")
    assert world.condition("Planned", "big")[0] == "True"
