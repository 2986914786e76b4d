"""Pools without nodes: Karpenter's NodePools, the cluster's own catalogue, and what either means for a ModelServe."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from modelserve.api import ModelServeSpec
from modelserve.catalogue import CATALOGUE_NAME
from modelserve.hardware import CATALOGUE
from modelserve.planning.pools.declared_pools import declared_offers
from modelserve_operator.cluster.kinds import CONFIG_MAP, DEPLOYMENT, NODE, NODE_POOL, SERVICE
from modelserve_operator.gathering.gather import NOTHING
from modelserve_operator.gathering.handlers import build_registry
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.process.work_queue import WorkQueue

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
GPU_NAME = "karpenter.k8s.aws/instance-gpu-name"
H300 = {"memoryMiB": 200_000, "bandwidthGBps": 6000, "bfloat16TFLOPS": 1500, "computeCapability": "9.0"}
WATCHED_LABEL = {"app.kubernetes.io/managed-by": "modelserve"}


def _node_pool(name: str = "gpu", *, gpu: str = "h200", **template: Any) -> dict[str, Any]:
    requirements = [{"key": GPU_NAME, "operator": "In", "values": [gpu]}, *template.pop("requirements", [])]
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, *template.pop("taints", [])]
    labels = template.pop("labels", {})
    spec = {"requirements": requirements, "taints": taints}
    return {"metadata": {"name": name}, "spec": {"template": {"metadata": {"labels": labels}, "spec": spec}}}


def _add(world, body: dict[str, Any]) -> None:
    world.cluster.refused_kinds.pop(NODE_POOL, None)
    world.cluster.put(NODE_POOL, body)
    world.settle()


def _terms(world) -> list[dict[str, list[str]]]:
    (deployment,) = world.cluster.of(DEPLOYMENT)
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [{each["key"]: each.get("values") for each in term["matchExpressions"]} for term in terms]


def _catalogue(world, labels: dict[str, str] = WATCHED_LABEL, **entries: Any) -> None:
    data = {name: entry if isinstance(entry, str) else json.dumps(entry) for name, entry in entries.items()}
    metadata = {"name": CATALOGUE_NAME, "namespace": "modelserve-system", "labels": labels}
    world.cluster.put(CONFIG_MAP, {"metadata": metadata, "data": data})
    world.settle()


PRODUCT, ARCH = "nvidia.com/gpu.product", "kubernetes.io/arch"


@pytest.mark.parametrize("status", [404, 403])
def test_without_karpenter_nothing_is_missing_and_nothing_is_retried(world, caplog, status: int) -> None:
    world.cluster.refused_kinds[NODE_POOL] = status
    with caplog.at_level(logging.WARNING):
        world.restart_operator()
    assert caplog.text == ""
    assert _watched(world) == {"modelserves", "nodes", "controllerrevisions", "deployments", "services", "configmaps",
                               "jobs", "pods", "poddisruptionbudgets", "endpointslices"}  # fmt: skip
    world.create({"model": MODEL}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")


def _watched(world) -> set[str]:
    registry = build_registry(world.gatherer, Replanning(world.gatherer, WorkQueue()))
    return {handler.id.removeprefix("heard-") for handler in registry._watching.get_all_handlers()}


def test_a_node_pool_is_planned_before_it_has_a_node(world) -> None:
    world.create({"model": MODEL}, name="big")
    _add(world, _node_pool())
    plan = world.status("big")["plan"]
    assert plan["accelerator"] == "NVIDIA-H200"
    known = {GPU_NAME: ["h200"], "karpenter.sh/nodepool": ["gpu"], ARCH: ["amd64"]}
    assert _terms(world) == [known | {PRODUCT: None}, known | {PRODUCT: ["NVIDIA-H200"]}], "it can grow, and is pinned"
    (deployment,) = world.cluster.of(DEPLOYMENT)
    (pod,) = world.cluster.pods_of(deployment)
    pending = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/0 nodes"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[pending])
    world.settle()
    assert world.condition("CapacityAvailable", "big") == ("False", "WaitingForNodes")
    assert world.condition("Stalled", "big") is None
    world.restart_operator()
    assert "nodepools" in _watched(world)
    world.settle()
    assert world.status("big")["plan"] == plan


def test_the_status_of_a_node_pool_is_no_news_and_its_spec_is(world) -> None:
    _add(world, _node_pool())
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    world.cluster.change(NODE_POOL, "gpu", lambda body: body.update(status={"resources": {"nodes": "3"}}))
    assert world.pending == set()
    world.cluster.remove(NODE_POOL, "", "gpu")
    assert world.pending
    world.settle()
    assert world.condition("Ready", "big") == ("True", "RolledOut"), "a running plan outlives its pool"


def test_a_node_pool_clears_a_stall(world) -> None:
    world.add_node("small", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    world.create({"model": MODEL}, name="big")
    assert world.condition("Stalled", "big") == ("True", "DoesNotFit")
    _add(world, _node_pool())
    assert world.condition("Stalled", "big") is None
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")


ZONE = "topology.kubernetes.io/zone"
ZONES = {"requirements": [{"key": ZONE, "operator": "In", "values": ["z1", "z2"]}]}
TEAM_TAINT = {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}


@pytest.mark.parametrize(
    ("selector", "tolerations", "template", "taken"),
    [
        ({}, [], {}, True),
        ({"team": "a"}, [], {"labels": {"team": "a"}}, True),
        ({"team": "b"}, [], {"labels": {"team": "a"}}, False),
        ({"team": "a"}, [], {}, False),
        ({ZONE: "z1"}, [], {}, True),
        ({ZONE: "z1"}, [], ZONES, True),
        ({ZONE: "z3"}, [], ZONES, False),
        ({}, [], TEAM_TAINT, False),
        ({}, [{"key": "team", "operator": "Exists"}], TEAM_TAINT, True),
    ],
)
def test_a_node_pool_counts_where_its_nodes_would_take_the_pods(
    selector: dict[str, str], tolerations: list[dict[str, str]], template: dict[str, Any], taken: bool
) -> None:
    spec = ModelServeSpec.model_validate(
        {"model": MODEL, "accelerators": {"nodeSelector": selector}, "pod": {"tolerations": tolerations}}
    )
    offers = declared_offers(spec, declared=(), node_pools=[_node_pool(**template)], catalogue=CATALOGUE)
    assert bool(offers) is taken


def test_an_entry_of_the_catalogue_names_new_nodes_and_may_declare_a_pool(world) -> None:
    world.create({"model": MODEL}, name="big")
    _catalogue(world, **{"NVIDIA-H300": {**H300, "gpusPerNode": 8, "nodeSelector": {"cloud.example/gpu": "h300"}}})
    plan = world.status("big")["plan"]
    assert plan["accelerator"] == "NVIDIA-H300"
    known = {"cloud.example/gpu": ["h300"], ARCH: ["amd64"]}
    assert _terms(world) == [known | {PRODUCT: None}, known | {PRODUCT: ["NVIDIA-H300"]}]
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")
    world.restart_operator()
    world.rest()
    world.settle()
    assert world.rest() == []


def test_a_wrong_entry_is_told_once_to_those_who_would_use_it_and_spoils_nothing(world, tiny_spec) -> None:
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": MODEL}, name="any")
    world.create({"model": MODEL, "accelerators": {"products": ["NVIDIA-H200"]}}, name="named")
    world.create(tiny_spec, name="tiny")
    before = world.deployments()
    _catalogue(world, **{"NVIDIA-H300": {**H300, "memoryMiB": -5}, "NVIDIA-H301": "{", "NVIDIA-H302": H300})
    message = world.message("Planned", "any")
    assert "NVIDIA-H300" in message
    assert "memoryMiB" in message
    assert "NVIDIA-H301" in message
    assert "NVIDIA-H302" not in message
    assert world.condition("Planned", "any") == ("True", "PlanCommitted")
    assert "H300" not in world.message("Planned", "named") + world.message("Planned", "tiny")
    told = [event for event in world.cluster.events if event["reason"] == "CatalogueEntryIgnored"]
    assert [(event["involvedObject"]["name"], event["type"]) for event in told] == [("any", "Warning")] * 2
    assert world.deployments() == before
    world.rest()
    world.pending = world.gatherer.known_keys()
    world.settle()
    assert world.rest() == []
    _catalogue(world, **{"NVIDIA-H302": H300})
    assert "ignored" not in world.message("Planned", "any")


def test_a_catalogue_without_the_watched_label_is_found_by_the_next_listing(world) -> None:
    world.create({"model": MODEL, "accelerators": {"products": ["NVIDIA-H300"]}}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    _catalogue(world, labels={}, **{"NVIDIA-H300": H300})
    assert world.condition("Planned", "big") == ("False", "NoAccelerators")
    heard, _ = asyncio.run(world.gatherer.relist())
    assert heard.supply
    world.pending = world.gatherer.concerned()
    world.settle()
    assert world.status("big")["plan"]["accelerator"] == "NVIDIA-H300"
    assert asyncio.run(world.gatherer.relist())[0] == NOTHING, "and is no news the time after"


def test_a_mig_slice_is_asked_for_by_its_own_name(world) -> None:
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920",
        "nvidia.com/mig-3g.40gb.count": "2", "nvidia.com/mig-3g.40gb.memory": "40192",
        "nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "0",
    }  # fmt: skip
    allocatable = {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "2"}
    world.cluster.put(NODE, {"metadata": {"name": "mig", "labels": labels}, "status": {"allocatable": allocatable}})
    resources = {"limits": {"nvidia.com/gpu": "4", "nvidia.com/mig-1g.10gb": "1", "cpu": "2"}}
    world.create({"model": {"uri": "hf://google/gemma-4-E4B-it"}, "pod": {"resources": resources}}, name="small")
    plan = world.status("small")["plan"]
    assert (plan["resourceName"], plan["gpusPerReplica"]) == ("nvidia.com/mig-3g.40gb", 1)
    (deployment,) = world.cluster.of(DEPLOYMENT)
    worker = deployment["spec"]["template"]["spec"]["containers"][0]
    limits = worker["resources"]["limits"]
    gpus = {name: value for name, value in limits.items() if name.startswith("nvidia.com/")}
    assert gpus == {"nvidia.com/mig-3g.40gb": "1"}, "what the operator sets wins"
    assert limits["cpu"] == "2"


def test_shared_gpus_are_refused_with_the_reason(world) -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.replicas": "4"}
    allocatable = {"nvidia.com/gpu": "8"}
    world.cluster.put(NODE, {"metadata": {"name": "s", "labels": labels}, "status": {"allocatable": allocatable}})
    world.create({"model": MODEL}, name="big")
    assert world.condition("Stalled", "big") == ("True", "DoesNotFit")
    assert "time-slicing" in world.message("Stalled", "big")
    assert world.cluster.of(DEPLOYMENT) == world.cluster.of(SERVICE) == []
