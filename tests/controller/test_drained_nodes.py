"""A node that is drained or removed under workers: with onEviction SurgeFirst another gets ready before one goes."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator.cluster.kinds import DISRUPTION_BUDGET, NODE, POD
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.observed.snapshot import Pod

CORDON = {"unschedulable": True}
GPU_TAINT = {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}


def _tainted(key: str) -> dict[str, Any]:
    return {"taints": [{"key": key, "effect": "NoSchedule"}]}


def _node(world, name: str, **spec: Any) -> None:
    world.cluster.put(NODE, {"metadata": {"name": name}, "spec": spec, "status": {}})
    world.settle()


def _place(world, node: str) -> None:
    """Pods without a node get this one."""
    for pod in world.cluster.of(POD):
        if "nodeName" not in pod["spec"]:
            world.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(nodeName=node))
    world.settle()


def _ready(world) -> dict[str, str]:
    """Nodes of ready workers by uid."""
    found = (pod for pod in world.cluster.of(POD) if Pod.from_body(pod).ready)
    return {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in found}


@pytest.fixture
def one(ready_world):
    """The only worker is on node a, and there is a node b."""
    for name in ("a", "b"):
        _node(ready_world, name, **GPU_TAINT)
    _place(ready_world, "a")
    ready_world.edit(rollout={"onEviction": "SurgeFirst"})
    return ready_world


LEAVING = (
    "karpenter.sh/disrupted",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
)


@pytest.mark.parametrize("leaves", [CORDON, *map(_tainted, LEAVING)], ids=["drain", *LEAVING])
def test_the_only_worker_goes_when_another_is_ready_elsewhere(one, leaves: dict[str, Any]) -> None:
    (budget,) = one.cluster.of(DISRUPTION_BUDGET)
    assert budget["spec"]["maxUnavailable"] == 0, "until then nobody evicts it"
    before, plan_hash = _ready(one), one.served_hash()
    _node(one, "a", **leaves)
    assert one.deployments() == {plan_hash: 2}
    assert _ready(one) == before
    assert one.condition("Ready") == ("True", "RolledOut"), "nothing is missing"
    _place(one, "b")
    one.make_ready()
    assert one.deployments() == {plan_hash: 1}
    assert list(_ready(one).values()) == ["b"]
    assert len(one.cluster.of(POD)) == 1
    assert one.condition("Available") == ("True", "Serving")
    one.rest()
    one.pass_time(600)
    assert one.rest() == []


def test_a_drain_that_is_called_off_leaves_the_worker(one) -> None:
    before, plan_hash = _ready(one), one.served_hash()
    _node(one, "a", **CORDON)
    assert one.deployments() == {plan_hash: 2}
    _node(one, "a", **GPU_TAINT)
    assert one.deployments() == {plan_hash: 1}
    assert _ready(one) == before


def test_several_go_one_after_the_other(one) -> None:
    one.edit(replicas=3)
    _place(one, "a")
    one.make_ready()
    _node(one, "a", **CORDON)
    for _ in range(3):
        assert len(one.cluster.of(POD)) <= 4
        assert len(_ready(one)) >= 3
        _place(one, "b")
        one.make_ready()
    assert set(_ready(one).values()) == {"b"}
    assert len(one.cluster.of(POD)) == 3


def test_without_leave_to_mark_it_the_worker_stays_and_the_other_too(one) -> None:
    """Else the newer one went, and the next one came, for ever."""
    plan_hash = one.served_hash()

    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("json_patch", POD):
            raise KubeError(403, "pods is forbidden")

    one.cluster.asked = refuse
    _node(one, "a", **CORDON)
    _place(one, "b")
    with pytest.raises(KubeError):
        one.make_ready()
    assert one.deployments() == {plan_hash: 2}
    assert sorted(_ready(one).values()) == ["a", "b"]


def test_by_default_a_drain_evicts_and_nothing_surges(ready_world) -> None:
    _node(ready_world, "a")
    _place(ready_world, "a")
    (budget,) = ready_world.cluster.of(DISRUPTION_BUDGET)
    assert budget["spec"]["maxUnavailable"] == 1
    ready_world.rest()
    _node(ready_world, "a", **CORDON)
    assert [each[:2] for each in ready_world.rest()] == [("patch", "Pod")], "autoscalers are let through"


SPOT = "cloud.google.com/gke-spot"


def test_spot_nodes_that_go_before_a_worker_stops_are_told(world) -> None:
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=1)
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}})
    world.make_ready()
    assert "SpotNotice" not in [event["reason"] for event in world.cluster.events]
    before, revision = world.cluster.of(POD), world.status()["revision"]
    world.cluster.change(NODE, "a", lambda body: body["metadata"]["labels"].update({SPOT: "true"}))
    world.settle()
    (event,) = [event for event in world.cluster.events if event["reason"] == "SpotNotice"]
    assert f"{SPOT}=true, which are gone 30 s after their notice, and take up to 87 s" in event["message"]
    assert "Set rollout.drainSeconds to 3" in event["message"]
    assert event["message"] in world.message("Planned")
    assert (world.cluster.of(POD), world.status()["revision"]) == (before, revision), "nothing else comes of it"
    assert world.condition("Ready") == ("True", "RolledOut")
    world.edit(rollout={"drainSeconds": 3})
    assert "notice" not in world.message("Planned")
