"""A node that stops answering, as the node lifecycle controller tells it: its pods turn unready, and later end.

The local cluster has one node, so this is played on the fake API: what the controllers write there is what they write.
"""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEPLOYMENT, DISRUPTION_BUDGET, NODE, POD, SERVICE

H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 1}
MODEL = {"uri": "hf://google/gemma-4-31B-it"}


@pytest.fixture
def two(world):
    """`big` with a worker on each of two nodes, and `other`, which has one on a third."""
    for name in ("a", "b", "c"):
        world.add_node(name, **H200)
    world.create({"model": MODEL, "replicas": 2}, name="big")
    world.create({"model": MODEL}, name="other")
    world.make_ready()
    for name in ("big", "other"):
        assert world.condition("Ready", name) == ("True", "RolledOut")
    world.rest()
    return world


def _pods(world, name: str = "big") -> list[dict[str, Any]]:
    return [pod for pod in world.cluster.of(POD) if labels.label_of(pod, labels.NAME) == name]


def _lose_node(world, pod: dict[str, Any]) -> None:
    """After the grace period: the node is Unknown and tainted, and its pods are marked unready."""

    def unknown(node: dict[str, Any]) -> None:
        node["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
        node["spec"] = {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}

    def unready(body: dict[str, Any]) -> None:
        body["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    world.cluster.change(NODE, "b", unknown)
    world.cluster.change(POD, pod["metadata"]["name"], unready)
    world.cluster.run_controllers()
    world.settle()


def _evict(world, pod: dict[str, Any]) -> None:
    """The taint's toleration ends: the pod is deleted, and stays, for nobody there confirms it."""

    def terminating(body: dict[str, Any]) -> None:
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"

    world.cluster.change(POD, pod["metadata"]["name"], terminating)
    world.cluster.run_controllers()
    world.settle()


def test_the_worker_that_is_left_serves_and_only_the_status_and_what_autoscalers_read_is_written(two) -> None:
    lost, kept = _pods(two)
    bystander = two.status("other")
    _lose_node(two, lost)
    assert two.condition("Available", "big") == ("True", "Serving")
    assert two.status("big")["readyReplicas"] == 1
    assert two.condition("Ready", "big")[0] == "False"
    assert two.condition("Stalled", "big") is None
    written = {what[:2] for what in two.rest() if what[0] != "create"}
    assert written == {("patch/status", "ModelServe"), ("patch", "Pod")}, "autoscalers spare the one that is left"
    assert kept["metadata"]["uid"] in {each["metadata"]["uid"] for each in _pods(two)}
    assert two.status("other") == bystander


def test_another_worker_takes_its_place_while_it_hangs_in_termination(two) -> None:
    lost, kept = _pods(two)
    _lose_node(two, lost)
    _evict(two, lost)
    assert len(_pods(two)) == 3, "the lost one, the kept one and one in its place"
    two.add_node("d", **H200)
    two.make_ready()
    assert two.condition("Ready", "big") == ("True", "RolledOut")
    assert (two.status("big")["replicas"], two.status("big")["readyReplicas"]) == (2, 2)
    assert len([each for each in two.cluster.of(DEPLOYMENT) if labels.label_of(each, labels.NAME) == "big"]) == 1
    assert len(two.cluster.of(SERVICE)) == len(two.cluster.of(DISRUPTION_BUDGET)) == 2, "one of each per ModelServe"
    two.rest()
    two.cluster.remove(NODE, "", "b")
    two.cluster.remove(POD, "ml", lost["metadata"]["name"])
    two.settle()
    assert two.condition("Ready", "big") == ("True", "RolledOut")
    assert {what[1] for what in two.rest()} <= {"ModelServe"}, "no child is written"
    assert kept["metadata"]["uid"] in {each["metadata"]["uid"] for each in _pods(two)}


def test_a_rollout_does_not_wait_for_a_pod_that_nobody_can_end(two) -> None:
    lost, kept = _pods(two)
    _lose_node(two, lost)
    _evict(two, lost)
    two.add_node("d", **H200)
    two.make_ready()
    two.edit("big", context={"maxModelLen": 4096})
    for _ in range(4):
        two.make_ready()
    assert two.condition("Ready", "big") == ("True", "RolledOut")
    assert kept["metadata"]["uid"] not in {each["metadata"]["uid"] for each in _pods(two)}
    (current,) = [
        each for each in two.cluster.of(DEPLOYMENT)
        if labels.label_of(each, labels.NAME) == "big" and each["spec"]["replicas"]
    ]  # fmt: skip
    assert two.revision("big") == labels.label_of(current, labels.PLAN_HASH)
    two.cluster.remove(POD, "ml", lost["metadata"]["name"])
    two.settle()
    assert [labels.label_of(each, labels.NAME) for each in two.cluster.of(DEPLOYMENT)].count("big") == 1
