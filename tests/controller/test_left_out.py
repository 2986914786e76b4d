"""Messages with causes: what each node lacks, what would fit instead, and each thing told once."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator.cluster.kinds import DEPLOYMENT, NODE

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}


def _node(world, name: str, product: str, *, gpus: str = "8", taint: str | None = None, **labels: str) -> None:
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    body = {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product, **labels}},
        "spec": {"taints": taints},
        "status": {"allocatable": {"nvidia.com/gpu": gpus}},
    }
    world.cluster.put(NODE, body)
    world.settle()


def test_no_accelerators_says_of_each_node_what_keeps_it_out(world) -> None:
    world.create({"model": MODEL, "accelerators": {"nodeSelector": {"zone": "a"}}}, name="big")
    assert "No node names a GPU" in world.message("Planned", "big")
    _node(world, "tainted", "NVIDIA-H200", taint="team", zone="a")
    _node(world, "idle", "NVIDIA-H200", gpus="0", zone="a")
    _node(world, "unknown", "Foo-9000", zone="a")
    _node(world, "elsewhere", "NVIDIA-H200", zone="b")
    world.cluster.put(NODE, {"metadata": {"name": "cpu", "labels": {"zone": "a"}}})
    message = world.message("Planned", "big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    assert "tainted: taint team:NoSchedule is not in spec.pod.tolerations" in message
    assert "idle: names NVIDIA-H200, but its allocatable nvidia.com/gpu is 0" in message
    assert "unknown: Foo-9000 is in no catalogue and the node has no label nvidia.com/gpu.memory" in message
    assert "elsewhere: label zone is b, spec.accelerators.nodeSelector wants a" in message
    assert "cpu" not in message
    world.cluster.change(NODE, "idle", lambda body: body["status"]["allocatable"].update({"nvidia.com/gpu": "8"}))
    world.settle()
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")


def test_a_plan_for_one_host_is_made_from_the_gpus_of_that_host(world) -> None:
    """Whatever else the cluster has: the pods can only run there."""
    host = {"kubernetes.io/hostname": "small"}
    world.create({"model": {"uri": "hf://google/gemma-4-E4B-it"}, "accelerators": {"nodeSelector": host}}, name="one")
    world.create({"model": MODEL}, name="any")
    world.add_node("large", **H200)
    assert world.condition("Planned", "one") == ("False", "NoAccelerators")
    wanted = "large: label kubernetes.io/hostname is not small, which spec.accelerators.nodeSelector wants"
    assert wanted in world.message("Planned", "one")
    world.add_node("small", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    assert world.status("one")["plan"]["accelerator"] == "NVIDIA-L4"
    assert world.status("any")["plan"]["accelerator"] == "NVIDIA-H200"
    (term,) = world.status("one")["plan"]["nodeSelectorTerms"]
    named = {each["key"]: each["values"] for each in term["matchExpressions"]}
    assert named == {"nvidia.com/gpu.product": ["NVIDIA-L4"], "kubernetes.io/hostname": ["small"]}
    world.rest()
    world.cluster.remove(NODE, "", "small")
    world.settle()
    assert world.condition("Planned", "one") == ("True", "PlanCommitted"), "a committed plan outlives its host"
    assert "proposed" not in world.message("Planned", "one")


def test_a_product_that_no_catalogue_has_is_said_with_the_nearest_one(world) -> None:
    world.create({"model": MODEL, "accelerators": {"products": ["H200"]}}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    assert "H200 is in no catalogue; nearest is NVIDIA-H200." in world.message("Planned", "big")
    world.edit("big", accelerators={"products": ["H200", "NVIDIA-H200"]})
    assert world.condition("Planned", "big") == ("True", "PlanCommitted"), "the other is taken on trust"


def test_a_long_list_of_nodes_is_cut(world) -> None:
    world.create({"model": MODEL}, name="big")
    for number in range(20):
        _node(world, f"n{number:02}", "NVIDIA-H200", gpus="0")
    message = world.message("Planned", "big")
    assert "n07" in message
    assert "n08" not in message
    assert "and 12 more" in message


def test_hardware_that_is_gone_while_another_plan_fits_is_said_with_the_command(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.add_node("a", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    (deployment,) = world.cluster.of(DEPLOYMENT)
    (pod,) = world.cluster.pods_of(deployment)
    pending = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[pending])
    world.settle()
    proposed = world.status("big")["proposedPlan"]["hash"]
    for kind in ("CapacityAvailable", "Planned", "PoolsGone", "Stalled"):
        assert f"approve-plan={proposed}" in world.message(kind, "big"), kind
    assert "NVIDIA-H100-80GB-HBM3" in world.message("CapacityAvailable", "big")


def test_what_does_not_fit_is_told_once(world) -> None:
    world.add_node("small", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    world.create({"model": MODEL}, name="big")
    assert [event["reason"] for event in world.cluster.events] == ["DoesNotFit"]
    assert world.condition("CapacityAvailable", "big") == ("False", "DoesNotFit")
    assert "GiB" not in world.message("CapacityAvailable", "big")
    assert "GiB" in world.message("Ready", "big")


@pytest.mark.parametrize("kind", ["worker", "inspection"])
def test_the_download_heeds_the_users_variables(world, tiny_spec: dict[str, Any], tiny_facts, kind: str) -> None:
    variables = [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    model = {"uri": "hf://example/small"}
    world.create({**tiny_spec, "model": model, "pod": {**tiny_spec["pod"], "env": variables}})
    owner = next(body for (each, _, _), body in world.cluster.objects.items() if each.kind == "Job")
    if kind == "worker":
        world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
        world.settle()
        (owner,) = world.cluster.of(DEPLOYMENT)
    for container in owner["spec"]["template"]["spec"]["initContainers"]:
        assert variables[0] in container["env"]
        assert variables[1] not in container["env"], "a download that is offline would be none"
