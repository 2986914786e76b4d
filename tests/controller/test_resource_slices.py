"""A cluster whose GPUs only ResourceSlices tell of: planned, and asked for by a claim."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CAPACITY_BUFFER,
    CLAIM_TEMPLATE,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    NODE,
    POD_TEMPLATE,
    RESOURCE_SLICE,
    ResourceKind,
)

MODEL = {"uri": "hf://google/gemma-4-31B-it"}


def _slice(node: str, *, gpus: int = 2, product: str = "NVIDIA H200", driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    attributes = {
        "type": {"string": "gpu"},
        "productName": {"string": product},
        "cudaComputeCapability": {"version": "9.0.0"},
    }
    capacity = {"memory": {"value": "143771Mi"}}
    devices = [{"name": f"gpu-{index}", "attributes": attributes, "capacity": capacity} for index in range(gpus)]
    return {"metadata": {"name": f"{node}-gpus"}, "spec": {"driver": driver, "nodeName": node, "devices": devices}}


def _node(name: str, **allocatable: str) -> dict[str, Any]:
    resources = {key.replace("__", "/").replace("_", "."): value for key, value in allocatable.items()}
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {"metadata": {"name": name, "labels": own}, "status": {"allocatable": resources}}


@pytest.fixture
def dynamic(world):
    """A cluster with dynamic resource allocation, and a node that no label names a GPU of."""
    world.serve(RESOURCE_SLICE, CLAIM_TEMPLATE)
    world.cluster.put(NODE, _node("a"))
    world.create({"model": MODEL}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    return world


def _plan(world) -> dict[str, Any]:
    plan = world.status("big").get("plan") or {}
    return {key: plan.get(key) for key in ("accelerator", "resourceName", "gpusPerReplica")}


def test_a_slice_makes_the_plan_and_the_pod_asks_by_a_claim(dynamic) -> None:
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    assert _plan(dynamic) == {"accelerator": "NVIDIA-H200", "resourceName": "gpu.nvidia.com", "gpusPerReplica": 1}
    (deployment,), (template,) = dynamic.cluster.of(DEPLOYMENT), dynamic.cluster.of(CLAIM_TEMPLATE)
    pod = deployment["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    (claim,) = pod["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"] == deployment["metadata"]["name"]
    assert worker["resources"]["claims"] == [{"name": claim["name"]}]
    assert not [key for side in ("requests", "limits") for key in worker["resources"][side] if "nvidia" in key]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 1
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert '"NVIDIA-H200"' in request["exactly"]["selectors"][0]["cel"]["expression"]
    assert template["metadata"]["ownerReferences"][0]["kind"] == "ModelServe"
    dynamic.make_ready()
    assert dynamic.condition("Ready", "big") == ("True", "RolledOut")
    dynamic.rest()
    dynamic.restart_operator()
    dynamic.settle()
    assert dynamic.rest() == [], "nothing is written at rest"


def test_a_node_that_is_heard_of_after_its_slice_is_the_same(world) -> None:
    world.serve(RESOURCE_SLICE, CLAIM_TEMPLATE)
    world.cluster.put(RESOURCE_SLICE, _slice("a"))
    world.create({"model": MODEL}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    world.cluster.put(NODE, _node("a"))
    world.settle()
    assert _plan(world)["resourceName"] == "gpu.nvidia.com"


def test_a_device_plugin_that_is_gone_for_good_leaves_a_zero_that_counts_for_nothing(world) -> None:
    world.serve(RESOURCE_SLICE, CLAIM_TEMPLATE)
    world.cluster.put(NODE, _node("a", nvidia_com__gpu="0"))
    world.cluster.put(RESOURCE_SLICE, _slice("a"))
    world.create({"model": MODEL}, name="big")
    assert _plan(world)["resourceName"] == "gpu.nvidia.com"


def test_two_slices_of_a_node_are_its_gpus_together(dynamic) -> None:
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a", gpus=1))
    second = _slice("a", gpus=1)
    second["metadata"]["name"] = "a-more"
    dynamic.cluster.put(RESOURCE_SLICE, second)
    dynamic.edit("big", parallelism={"tensor": 2})
    assert _plan(dynamic)["gpusPerReplica"] == 2


def test_where_a_device_plugin_offers_the_same_gpus_they_are_asked_for_as_ever(world) -> None:
    world.serve(RESOURCE_SLICE, CLAIM_TEMPLATE)
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=2)
    world.cluster.put(RESOURCE_SLICE, _slice("a"))
    world.create({"model": MODEL}, name="big")
    assert _plan(world)["resourceName"] == "nvidia.com/gpu"
    assert world.cluster.of(CLAIM_TEMPLATE) == []
    assert "resourceClaims" not in world.cluster.of(DEPLOYMENT)[0]["spec"]["template"]["spec"]


def test_a_plan_does_not_change_when_the_driver_restarts(dynamic) -> None:
    """Its slices go and come back: that is a proposal's business at most, and nobody's work is ended."""
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    dynamic.make_ready()
    before = dynamic.status("big")["revision"]
    dynamic.cluster.remove(RESOURCE_SLICE, "", "a-gpus")
    dynamic.settle()
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    assert dynamic.status("big")["revision"] == before
    assert dynamic.condition("Ready", "big") == ("True", "RolledOut")
    assert "proposedPlan" not in dynamic.status("big")


def test_slices_that_say_the_same_again_are_no_news(dynamic) -> None:
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    again = _slice("a")
    again["spec"]["pool"] = {"name": "a", "generation": 7}
    heard = dynamic.gatherer.hear(RESOURCE_SLICE, again, deleted=False)
    assert not heard.supply
    other = dynamic.gatherer.hear(RESOURCE_SLICE, _slice("b", driver="net.example.com"), deleted=False)
    assert not other.supply


@pytest.mark.parametrize("kinds", [(), (CLAIM_TEMPLATE,)])
def test_without_the_api_everything_is_as_before(world, kinds: tuple[ResourceKind, ...]) -> None:
    world.serve(*kinds)
    world.cluster.put(NODE, _node("a"))
    world.create({"model": MODEL}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    world.add_node("b", product="NVIDIA-H200", memory_mib=143_771, gpus=2)
    assert _plan(world)["resourceName"] == "nvidia.com/gpu"


def test_no_room_is_kept_of_a_shape_that_no_placeholder_has(dynamic) -> None:
    dynamic.serve(POD_TEMPLATE, CAPACITY_BUFFER)
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    dynamic.make_ready()
    dynamic.edit("big", capacityBuffer={"replicas": 1})
    assert dynamic.condition("CapacityBuffered", "big") == ("False", "BufferWithheld")
    assert dynamic.cluster.of(CAPACITY_BUFFER) == []


def test_the_claims_template_goes_with_its_revision(dynamic) -> None:
    dynamic.cluster.put(RESOURCE_SLICE, _slice("a"))
    dynamic.settle()
    dynamic.make_ready()
    dynamic.edit("big", context={"maxModelLen": 4096})
    assert len(dynamic.cluster.of(CLAIM_TEMPLATE)) == 2, "the old one serves"
    for _ in range(2):
        dynamic.make_ready()
    (left,) = dynamic.cluster.of(CLAIM_TEMPLATE)
    assert labels.label_of(left, labels.PLAN_HASH) == dynamic.revision("big")
    assert len(dynamic.cluster.of(CONTROLLER_REVISION)) == 2, "both are kept to go back to"
