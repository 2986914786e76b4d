"""Leave for downtime gives no GPU away: where others wait for it, the worker that serves stays, for a while.

Who could never take it keeps nobody waiting, and nobody reads names of another namespace.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM_TEMPLATE, DEPLOYMENT, NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.observed.snapshot import Pod

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 1}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
OUR_NODE = {"key": "metadata.name", "operator": "In", "values": ["a"]}


def _affinity(key: str, operator: str, values: list[str]) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}


@pytest.fixture
def full(world):
    """`big` serves on the only GPU, and may be down for a moment."""
    world.add_node("a", **H200)
    world.create({"model": MODEL, "rollout": {"allowDowntime": True}}, name="big")
    world.make_ready()
    _onto_the_node(world)
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    return world


def _onto_the_node(world) -> None:
    for pod in world.cluster.of(POD):
        world.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(nodeName="a"))
    world.settle()


def _other_pod(
    world,
    name: str,
    *,
    resource: str | None = "nvidia.com/gpu",
    count: int = 1,
    since: timedelta | None = None,
    namespace: str = "other",
    deletionTimestamp: str | None = None,
    **spec,
) -> None:
    """A pod of somebody else that waits for a node; `since`: for how long the scheduler has found none."""
    metadata = {"name": name, "namespace": namespace}
    if deletionTimestamp is not None:
        metadata["deletionTimestamp"] = deletionTimestamp
    container = {"name": "train", "resources": {"limits": {resource: str(count)}} if resource else {}}
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    at = world.now - (since or timedelta(0))
    status = {"phase": "Pending", "conditions": [{**found, "lastTransitionTime": at.isoformat()}]}
    world.cluster.put(POD, {"metadata": metadata, "spec": {"containers": [container], **spec}, "status": status})


def _edit_without_room(world) -> tuple[str, str, set[str]]:
    """Another plan; its pod finds no room. Hashes of the old revision and the new one, and uids of ready pods."""
    old, ready = world.served_hash("big"), _ready(world)
    world.edit("big", context={"maxModelLen": 4096})
    new = world.revision("big")
    (pod,) = world.cluster.pods_of(world.deployment(new))
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[scheduled])
    world.settle()
    return old, new, ready


def _ready(world) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of(POD) if Pod.from_body(pod).ready}


def test_where_others_wait_for_the_same_gpus_the_worker_stays(full) -> None:
    _other_pod(full, "thief")
    old, new, ready = _edit_without_room(full)
    assert full.deployments() == {old: 1, new: 1}
    assert _ready(full) == ready
    assert full.condition("Available", "big") == ("True", "Serving")
    assert full.condition("CapacityAvailable", "big") == ("False", "NoSurgeCapacity")
    assert "a pod of another namespace would take the GPUs" in full.message("CapacityAvailable", "big")
    assert "thief" not in json.dumps([full.status("big"), full.cluster.events])
    full.cluster.remove(POD, "other", "thief")
    full.pass_time(61)
    assert full.deployments() == {old: 0, new: 1}, "it has gone, and the place is ours"


@pytest.mark.parametrize(
    "other",
    [
        {"resource": "nvidia.com/mig-1g.10gb"},
        {"priority": -5},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"nodeSelector": {"nope": "x"}},
        {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100"}},
        {"affinity": _affinity("nvidia.com/gpu.product", "NotIn", ["NVIDIA-H200"])},
        {"affinity": _affinity("nvidia.com/gpu.memory", "Lt", ["90000"])},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}}},
        {"count": 2},
        {"since": timedelta(minutes=11)},
        {"containers": [{"name": "a", "resources": {"requests": {"nvidia.com/gpu": "1", "example.com/nic": "1"}}}]},
        {"resource": None, "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}]},
    ],
    ids=[
        "another resource",
        "behind us",
        "on its way out",
        "no such node",
        "another GPU",
        "affinity against ours",
        "affinity of numbers",
        "affinity that selects nothing",
        "more than a node has",
        "waiting in vain",
        "with a device that is not there",
        "a claim of no GPU",
    ],
)
def test_who_would_not_take_them_does_not_count(full, other) -> None:
    _other_pod(full, "harmless", **other)
    old, new, _ = _edit_without_room(full)
    assert full.deployments() == {old: 0, new: 1}


def test_nobody_is_asked_about_where_there_is_room(full) -> None:
    full.add_node("b", **H200)
    full.settle()
    _other_pod(full, "thief")
    asked: Counter[str] = Counter()
    full.cluster.asked = lambda request: asked.update([request.verb])
    full.edit("big", context={"maxModelLen": 4096})
    full.make_ready()
    assert full.condition("Ready", "big") == ("True", "RolledOut")
    assert asked["json_patch"]
    assert not asked["unplaced_pods"]


@pytest.mark.parametrize(
    "other",
    [
        {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}},
        {"affinity": _affinity("nvidia.com/gpu.memory", "Gt", ["90000"])},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [OUR_NODE]}]}}}},
        {"since": timedelta(minutes=9)},
        {"namespace": "ml"},
    ],
    ids=["our GPU", "affinity of numbers", "our node by name", "a while ago", "of our namespace"],
)
def test_who_would_take_them_counts(full, other) -> None:
    _other_pod(full, "thief", **other)
    old, new, ready = _edit_without_room(full)
    assert full.deployments() == {old: 1, new: 1}
    assert _ready(full) == ready
    assert ("pod thief would" in full.message("CapacityAvailable", "big")) is ("namespace" in other)


def test_a_taint_that_they_do_not_tolerate_keeps_them_out(full) -> None:
    taint = {"key": "team", "value": "ml", "effect": "NoSchedule"}
    full.cluster.change(NODE, "a", lambda body: body.update(spec={"taints": [taint]}))
    _other_pod(full, "outsider")
    old, new, _ = _edit_without_room(full)
    assert full.deployments() == {old: 0, new: 1}


def test_pods_that_come_again_and_again_hold_a_rollout_up_no_longer_than_one_does(full) -> None:
    _other_pod(full, "thief-0")
    old, new, ready = _edit_without_room(full)
    for number in range(1, 11):
        assert full.deployments() == {old: 1, new: 1}, number
        assert _ready(full) == ready
        full.cluster.remove(POD, "other", f"thief-{number - 1}")
        _other_pod(full, f"thief-{number}")
        full.pass_time(61)
    assert full.deployments() == {old: 0, new: 1}


def test_many_rollouts_ask_once(full) -> None:
    asked: Counter[str] = Counter()
    full.cluster.asked = lambda request: asked.update([request.verb])
    _other_pod(full, "thief")
    _edit_without_room(full)
    for _ in range(20):
        full.pending = full.gatherer.known_keys()
        full.settle()
    assert asked["unplaced_pods"] == 1, "what was listed a moment ago is shared"
    full.pass_time(61)
    assert asked["unplaced_pods"] == 2


# --- dynamic resource allocation: claims count as limits do ---------------------------------------------------------


@pytest.fixture
def claimed(world):
    """`big` serves on the only GPU, which ResourceSlices alone tell of."""
    world.serve(RESOURCE_SLICE, CLAIM_TEMPLATE)
    own = {"kubernetes.io/hostname": "a", "kubernetes.io/os": "linux"}
    world.cluster.put(NODE, {"metadata": {"name": "a", "labels": own}, "status": {"allocatable": {"cpu": "8"}}})
    attributes = {
        "type": {"string": "gpu"},
        "productName": {"string": "NVIDIA H200"},
        "cudaComputeCapability": {"version": "9.0.0"},
    }
    device = {"name": "gpu-0", "attributes": attributes, "capacity": {"memory": {"value": "143771Mi"}}}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "a", "devices": [device]}
    world.cluster.put(RESOURCE_SLICE, {"metadata": {"name": "a-gpus"}, "spec": spec})
    world.create({"model": MODEL, "rollout": {"allowDowntime": True}}, name="big")
    world.make_ready()
    _onto_the_node(world)
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    return world


def _claim(device_class: str, *, count: int = 1, alternatives: bool = False) -> dict[str, Any]:
    wanted = {"deviceClassName": device_class, "count": count}
    request = {"firstAvailable": [{"name": "b", **wanted}]} if alternatives else {"exactly": wanted}
    return {"devices": {"requests": [{"name": "gpus", **request}]}}


def _put_claim(world, spec: dict[str, Any], *, template: bool = True, **status: Any) -> dict[str, Any]:
    """What a pod says of its claim."""
    metadata = {"name": "theirs", "namespace": "other"}
    if template:
        world.cluster.put(CLAIM_TEMPLATE, {"metadata": metadata, "spec": {"spec": spec}})
        return {"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "theirs"}], "resource": None}
    world.cluster.put(RESOURCE_CLAIM, {"metadata": metadata, "spec": spec, "status": status})
    return {"resourceClaims": [{"name": "x", "resourceClaimName": "theirs"}], "resource": None}


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("alternatives", [True, False])
def test_a_claim_for_our_gpus_counts(claimed, template: bool, alternatives: bool) -> None:
    claim = _claim("gpu.nvidia.com", alternatives=alternatives)
    _other_pod(claimed, "thief", **_put_claim(claimed, claim, template=template))
    old, new, ready = _edit_without_room(claimed)
    assert claimed.deployments() == {old: 1, new: 1}
    assert _ready(claimed) == ready
    assert "a pod of another namespace would take the GPUs" in claimed.message("CapacityAvailable", "big")
    claimed.cluster.remove(POD, "other", "thief")
    claimed.pass_time(61)
    assert claimed.deployments() == {old: 0, new: 1}


@pytest.mark.parametrize(
    ("claim", "status"),
    [
        (_claim("nic.example.com"), {}),
        (_claim("gpu.nvidia.com", count=2), {}),
        (_claim("gpu.nvidia.com"), {"allocation": {"devices": {}}}),
    ],
    ids=["other devices", "more than a node has", "allocated already"],
)
def test_a_claim_that_takes_nothing_of_ours_does_not_count(claimed, claim, status) -> None:
    _other_pod(claimed, "harmless", **_put_claim(claimed, claim, template=False, **status))
    old, new, _ = _edit_without_room(claimed)
    assert claimed.deployments() == {old: 0, new: 1}


def test_a_claim_that_is_not_there_lets_no_pod_start(claimed) -> None:
    _other_pod(claimed, "typo", resource=None, resourceClaims=[{"name": "x", "resourceClaimName": "nope"}])
    old, new, _ = _edit_without_room(claimed)
    assert claimed.deployments() == {old: 0, new: 1}


def test_where_claims_cannot_be_read_their_pods_count(claimed) -> None:
    def refuse(request) -> None:
        if (request.verb, request.kind) == ("get", RESOURCE_CLAIM):
            raise KubeError(403, "resourceclaims is forbidden")

    claimed.cluster.asked = refuse
    _other_pod(claimed, "thief", **_put_claim(claimed, _claim("nic.example.com"), template=False))
    old, new, _ = _edit_without_room(claimed)
    assert claimed.deployments() == {old: 1, new: 1}


def test_a_limit_is_no_claim(claimed) -> None:
    _other_pod(claimed, "by-plugin")
    old, new, _ = _edit_without_room(claimed)
    assert claimed.deployments() == {old: 0, new: 1}, "no node has nvidia.com/gpu"


# --- others that exchange their workers as well ---------------------------------------------------------------------


def _two_on(world, **second: Any) -> None:
    """`big` and `other` on one node, which they fill."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=2)
    rollout = {"allowDowntime": True}
    world.create({"model": MODEL, "rollout": rollout}, name="big")
    world.create({"model": MODEL, "rollout": {**rollout, **second}}, name="other")
    world.make_ready()
    _onto_the_node(world)


def _new_pods(world) -> list[dict[str, Any]]:
    return [pod for pod in world.cluster.of(POD) if "nodeName" not in pod["spec"]]


def _both_edited(world) -> None:
    """Both have another plan; neither new pod finds room."""
    for name in ("big", "other"):
        world.edit(name, context={"maxModelLen": 4096})
    for pod in _new_pods(world):
        found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
        replica_set = {"kind": "ReplicaSet", "name": f"{pod['metadata']['ownerReferences'][0]['name']}-5d", "uid": "x"}
        owners = [*pod["metadata"]["ownerReferences"], replica_set]
        world.cluster.change(
            POD, pod["metadata"]["name"], lambda body, owners=owners: body["metadata"].update(ownerReferences=owners)
        )
        world.cluster.set_pod(pod, phase="Pending", conditions=[found])
    world.settle()


def _replicas(world, name: str) -> list[int]:
    """Of its Deployments, the one that has served first."""
    found = [each for each in world.cluster.of(DEPLOYMENT) if labels.label_of(each, labels.NAME) == name]
    found.sort(key=lambda each: int(each["metadata"]["uid"].removeprefix("uid-")))
    return [each["spec"]["replicas"] for each in found]


def test_two_that_exchange_their_workers_do_not_wait_for_each_other(world) -> None:
    _two_on(world)
    _both_edited(world)
    assert (_replicas(world, "big"), _replicas(world, "other")) == ([0, 1], [1, 1])
    new = world.deployment(world.revision("big"))
    (pod,) = world.cluster.pods_of(new)
    world.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(nodeName="a"))
    world.cluster.make_ready(new)
    world.pass_time(16)
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    assert _replicas(world, "other") == [0, 1]


def test_one_that_would_keep_its_worker_too_takes_what_another_leaves(world) -> None:
    _two_on(world, allowDowntime=False)
    ready = _ready(world)
    _both_edited(world)
    world.pass_time(61)
    assert (_replicas(world, "big"), _replicas(world, "other")) == ([1, 1], [1, 1])
    assert _ready(world) == ready


def test_a_pod_that_passes_for_such_a_worker_is_none(world) -> None:
    _two_on(world)
    ready = _ready(world)
    forged = {labels.NAME: "other", labels.PLAN_HASH: "0123456789"}
    _other_pod(world, "thief", namespace="ml")
    world.cluster.change(POD, "thief", lambda body: body["metadata"].update(labels=forged))
    _edit_without_room(world)
    assert _replicas(world, "big") == [1, 1]
    assert _ready(world) == ready
