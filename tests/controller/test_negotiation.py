"""A pool that came out smaller than planned: a shorter context down to minModelLen, and a terminal stop below it."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator.cluster.kinds import DEPLOYMENT, POD

GIB = 1 << 30
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://google/gemma-4-31B-it"},
    "context": {"maxModelLen": 65_536, "minModelLen": 32_768},
}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 2}


def _events(world) -> list[tuple[str, str]]:
    return [(event["type"], event["reason"]) for event in world.cluster.events]


def test_a_shorter_context_is_served_said_and_no_reason_to_stall(world) -> None:
    world.add_node("a", **H200)
    world.create({**SPEC, "replicas": 2}, name="big")
    (deployment,) = world.cluster.of(DEPLOYMENT)
    world.cluster.make_ready(deployment)
    plans = iter(world.cluster.worker_plans.values())
    next(plans)["maxModelLen"] = 40_000
    other = next(plans)
    other["allocated"] = {**other["allocated"], "kvPoolBytes": other["perGpu"]["kvPoolBytes"] - 3 * GIB}
    other["maxModelLen"] = 33_000
    world.settle()
    status = world.status("big")
    assert status["maxModelLen"] == 33_000, "the smallest of the ready workers"
    assert status["plan"]["maxModelLen"] == 65_536
    assert world.condition("WorkersReady", "big") == ("True", "ContextReduced")
    message = world.message("WorkersReady", "big")
    assert "serve 33,000 tokens instead of the planned 65,536" in message
    assert "3.00 GiB per GPU smaller" in message
    assert "down to 32,768" in message
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    assert "33,000" in world.message("Ready", "big")
    assert world.condition("Stalled", "big") is None
    assert _events(world).count(("Warning", "ContextReduced")) == 1
    world.rest()
    world.pending = world.gatherer.known_keys()
    world.settle()
    assert world.rest() == [], "and it is said once"


def test_the_planned_context_is_no_news(world) -> None:
    world.add_node("a", **H200)
    world.create(SPEC, name="big")
    world.make_ready()
    assert world.condition("WorkersReady", "big") == ("True", "AllReady")
    assert ("Warning", "ContextReduced") not in _events(world)


@pytest.mark.parametrize("replicas", [1, 2])
def test_below_the_minimum_it_stops_for_good_with_the_missing_bytes(world, replicas: int) -> None:
    world.add_node("a", **H200)
    world.create({**SPEC, "replicas": replicas}, name="big")
    text = "one request of minModelLen 32768 tokens does not fit; lower minModelLen"
    message = TerminationMessage(
        reason=TerminationReason.InsufficientMemory, message=text, shortfallBytes=123_456
    ).encode()
    pod = world.cluster.of(POD)[0]
    ended = {"terminated": {"exitCode": TERMINAL_EXIT_CODE, "message": message}}
    world.cluster.set_pod(pod, phase="Running", containerStatuses=[{"name": "worker", "lastState": ended, "state": {}}])
    world.settle()
    assert list(world.deployments().values()) == [0], "no crash loop: the GPUs are free again"
    assert world.cluster.of(POD) == []
    assert world.condition("Stalled", "big") == ("True", "InsufficientMemory")
    assert world.condition("Ready", "big") == ("False", "InsufficientMemory")
    assert "123,456 bytes are missing per GPU" in world.message("Stalled", "big")
    assert "lower minModelLen" in world.message("Stalled", "big")
    world.rest()
    world.restart_operator()
    world.settle()
    assert world.rest() == []
    world.edit("big", context={"maxModelLen": 65_536, "minModelLen": 4096})
    assert world.condition("Stalled", "big") is None, "a spec change tries again"
