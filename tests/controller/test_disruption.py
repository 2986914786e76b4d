"""What autoscalers are told of each worker: to spare one that loads and the only one, and not to wait for ever."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator.cluster.kinds import DEPLOYMENT, NODE, POD
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.observed.snapshot import Pod

KARPENTER, AUTOSCALER = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
SPARED, FREE = ("true", "false"), (None, "true")
TAINT = {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}


def _told(world) -> dict[str, tuple[Any, Any]]:
    """(Karpenter, Cluster Autoscaler) by pod."""
    found = {}
    for pod in world.cluster.of(POD):
        annotations = pod["metadata"].get("annotations") or {}
        found[pod["metadata"]["name"]] = (annotations.get(KARPENTER), annotations.get(AUTOSCALER))
    return found


def _node(world, name: str, **spec: Any) -> None:
    world.cluster.put(NODE, {"metadata": {"name": name}, "spec": spec, "status": {}})
    for pod in world.cluster.of(POD):
        if "nodeName" not in pod["spec"]:
            world.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(nodeName=name))
    world.settle()


def test_the_only_worker_is_spared_from_its_birth_on(ready_world) -> None:
    assert list(_told(ready_world).values()) == [SPARED]
    template = ready_world.cluster.of(DEPLOYMENT)[0]["spec"]["template"]
    assert (template["metadata"]["annotations"][KARPENTER], template["metadata"]["annotations"][AUTOSCALER]) == SPARED
    assert ("patch", "Pod") not in {each[:2] for each in ready_world.rest()}, "so nobody has to write it"


def test_of_two_that_are_ready_either_may_go_but_none_that_loads(ready_world) -> None:
    (first,) = _told(ready_world)
    ready_world.edit(replicas=2)
    (second,) = _told(ready_world).keys() - {first}
    assert _told(ready_world) == {first: SPARED, second: SPARED}, "the second one loads, and the first serves alone"
    ready_world.make_ready()
    assert _told(ready_world) == {first: FREE, second: FREE}
    ready_world.rest()
    ready_world.pass_time(600)
    assert ready_world.rest() == []
    ready_world.edit(replicas=1)
    assert list(_told(ready_world).values()) == [SPARED]


def test_when_one_of_two_is_lost_the_other_is_spared_again(ready_world) -> None:
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    lost, left = sorted(_told(ready_world))
    ready_world.cluster.remove(POD, "ml", lost)
    ready_world.settle()
    assert _told(ready_world)[left] == SPARED
    assert len(_told(ready_world)) == 2


def test_a_rollout_of_one_replica_lets_nobody_go(ready_world) -> None:
    ready_world.edit(context={"maxModelLen": 1024})
    ready_world.make_ready()
    assert set(_told(ready_world).values()) == {SPARED}


def test_on_a_node_that_goes_anyway_nothing_is_waited_for(ready_world) -> None:
    """Karpenter waits for ever for a pod that it must not evict; without SurgeFirst nobody else moves it."""
    _node(ready_world, "a")
    _node(ready_world, "a", **TAINT)
    assert list(_told(ready_world).values()) == [FREE]
    _node(ready_world, "a")
    assert list(_told(ready_world).values()) == [SPARED], "called off"


def test_under_surge_first_the_operator_moves_it_and_nobody_else(ready_world) -> None:
    _node(ready_world, "a")
    ready_world.edit(rollout={"onEviction": "SurgeFirst"})
    _node(ready_world, "a", **TAINT)
    assert set(_told(ready_world).values()) == {SPARED}


@pytest.mark.parametrize("annotation", [{KARPENTER: "30m"}, {AUTOSCALER: "no"}])
def test_what_the_user_says_stands_alone(ready_world, annotation: dict[str, str]) -> None:
    resources = {"requests": {"cpu": "0.5"}, "limits": {"memory": "3Gi"}}
    ready_world.edit(pod={"resources": resources, "annotations": annotation}, replicas=2)
    for _ in range(2):  # the surge, and what takes the place of the old one
        ready_world.make_ready()
    said = (annotation.get(KARPENTER), annotation.get(AUTOSCALER))
    assert set(_told(ready_world).values()) == {said}
    ready_world.rest()
    _node(ready_world, "a", **TAINT)
    assert set(_told(ready_world).values()) == {said}


def test_without_leave_to_patch_pods_nothing_else_is_held_up(ready_world) -> None:
    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("json_patch", POD):
            raise KubeError(403, "pods is forbidden")

    ready_world.cluster.asked = refuse
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert sum(Pod.from_body(pod).ready for pod in ready_world.cluster.of(POD)) == 2
    ready_world.cluster.asked = None
    ready_world.pass_time(61)
    assert set(_told(ready_world).values()) == {FREE}
