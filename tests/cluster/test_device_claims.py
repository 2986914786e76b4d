"""GPUs that only ResourceSlices tell of, before a real scheduler: a worker's claim is allocated the planned product on
its node, all of a replica's GPUs together, and nothing of another product. A rollout that would give such GPUs up sees
who waits for them, with the rights that the operator has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from localcluster.binaries import require_programs
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import wait_for
from localcluster.operator_process import permissions
from localcluster.processes import spawn
from modelserve.api import ModelServe
from modelserve.published import published_model
from modelserve_operator.cluster.kinds import CLAIM_TEMPLATE
from modelserve_operator.cluster.kube import ClusterKube
from modelserve_operator.gathering.pending_pods import PendingPods
from modelserve_operator.inventory.pools import Inventory
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.claim_template import claim_template
from modelserve_operator.observed.snapshot import Observed, Pod
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.settings import Settings
from modelserve_operator.sources import model_source

pytestmark = pytest.mark.e2e

URI = "hf://google/gemma-4-31B-it"
PRODUCTS = {"h200": ("NVIDIA H200", "143771Mi", "9.0.0"), "l4": ("NVIDIA L4", "23034Mi", "8.9.0")}
CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "gpu.nvidia.com"},
    "spec": {"selectors": [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]},
}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A scheduler, the controller that makes claims, and two nodes of two and four GPUs, as NVIDIA's driver tells."""
    with control_plane() as found:
        programs, config = require_programs(lambda _: None), f"--kubeconfig={found.folder / 'admin.kubeconfig'}"
        more = {"kube-scheduler": (), "kube-controller-manager": ("--controllers=resourceclaim-controller",)}
        started = [
            spawn(
                [str(programs[name]), config, "--leader-elect=false", "--secure-port=0", *line],
                log=found.folder / f"{name}.log",
                environment={},
            )
            for name, line in more.items()
        ]
        try:
            found.kubectl.apply(CLASS, *(_node(name) for name in PRODUCTS), _slice("l4", 4), _slice("h200", 2))
            found.kubectl.run("taint", "node", "--all", "node.kubernetes.io/not-ready-", "--overwrite")
            yield found
        finally:
            for process in started:
                process.terminate(timeout_s=20)


def _node(name: str) -> dict[str, Any]:
    resources = {"cpu": "96", "memory": "1Ti", "pods": "110", "ephemeral-storage": "2Ti"}
    own = {"kubernetes.io/os": "linux", "kubernetes.io/hostname": name}
    status = {"capacity": resources, "allocatable": resources}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": own}, "status": status}


def _slice(node: str, gpus: int) -> dict[str, Any]:
    product, memory, capability = PRODUCTS[node]
    attributes = {
        "type": {"string": "gpu"},
        "productName": {"string": product},
        "cudaComputeCapability": {"version": capability},
    }
    devices = [
        {"name": f"gpu-{index}", "attributes": attributes, "capacity": {"memory": {"value": memory}}}
        for index in range(gpus)
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": devices}
    metadata = {"name": f"{node}-gpu.nvidia.com"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def _inventory(plane: ControlPlane) -> Inventory:
    inventory = Inventory()
    for node in plane.kubectl.items("nodes"):
        inventory.hear(node, deleted=False)
    for each in plane.kubectl.items("resourceslices"):
        inventory.hear_slice(each, deleted=False)
    return inventory


def _supply(plane: ControlPlane) -> Supply:
    inventory = _inventory(plane)
    return Supply(pools=inventory.pools(), nodes_of=inventory.nodes_of())


def _revision(document: dict[str, Any], supply: Supply) -> Revision:
    spec, facts = ModelServe.parse(document).spec, published_model(URI)
    assert facts is not None
    settings = Settings(worker_image="worker:test")
    builder = RevisionBuilder(spec, document["metadata"]["name"], model_source(spec), facts, settings)
    return builder.proposed(plan_for(spec, facts, supply))


@pytest.mark.parametrize(("name", "gpus", "product"), [("two", 2, None), ("small", 4, "NVIDIA-L4")])
def test_a_claim_is_allocated_the_planned_product(
    plane: ControlPlane, name: str, gpus: int, product: str | None
) -> None:
    spec: dict[str, Any] = {"model": {"uri": URI}, "parallelism": {"tensor": gpus}}
    if product is not None:
        spec |= {"accelerators": {"products": [product]}, "context": {"maxModelLen": 2048}}
    document = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }
    plane.kubectl.run("apply", "-f", "-", document=json.dumps(document))
    revision = _revision(document, _supply(plane))
    template = claim_template(plane.kubectl.get("modelserve", name), revision)
    assert template is not None
    pod = json.loads(json.dumps(revision.template))
    pod["metadata"] |= {"name": name, "namespace": "default"}
    claims = {"apiVersion": CLAIM_TEMPLATE.api_version, "kind": CLAIM_TEMPLATE.kind, **template}
    plane.kubectl.apply(claims, {"apiVersion": "v1", "kind": "Pod", **pod})
    wait_for("the pod has a node", lambda: "nodeName" in plane.kubectl.get("pod", name)["spec"])
    wanted = "l4" if product else "h200"
    assert plane.kubectl.get("pod", name)["spec"]["nodeName"] == wanted
    (claim,) = [each for each in plane.kubectl.items("resourceclaims") if each["metadata"]["name"].startswith(name)]
    allocated = claim["status"]["allocation"]["devices"]["results"]
    assert [(each["driver"], each["pool"]) for each in allocated] == [("gpu.nvidia.com", wanted)] * gpus


def _waits(plane: ControlPlane, name: str, claim: dict[str, Any]) -> None:
    """A pod of another namespace that finds no node."""
    request = {"name": "gpus", "exactly": {"allocationMode": "ExactCount", "count": 1, **claim}}
    own = {"name": name, "namespace": "other"}
    kind = {"apiVersion": CLAIM_TEMPLATE.api_version, "kind": CLAIM_TEMPLATE.kind}
    template = {**kind, "metadata": own, "spec": {"spec": {"devices": {"requests": [request]}}}}
    container = {"name": "train", "image": "train:1", "resources": {"claims": [{"name": "x"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "x", "resourceClaimTemplateName": name}]}
    plane.kubectl.apply(template, {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": spec})

    def unschedulable() -> bool:
        found = plane.kubectl.get("pod", name, "-n", "other").get("status", {}).get("conditions") or ()
        return any(each.get("reason") == "Unschedulable" for each in found)

    wait_for(f"{name} waits", unschedulable)


def test_who_waits_for_the_claimed_gpus_is_seen_with_the_operators_rights(plane: ControlPlane) -> None:
    plane.kubectl.apply(*permissions(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "other"}}
    plane.kubectl.apply(account)
    body = plane.kubectl.get("pod", "two")  # of the test before: it has both GPUs of its node
    body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    document = plane.kubectl.get("modelserve", "two")
    revision = _revision(document, _supply(plane))
    observed = Observed(model_serve=document, pods=(Pod.from_body(body),))

    async def rivals() -> tuple[str, ...]:
        async with ClusterKube(through_api_proxy=False, kubeconfig=plane.operator_kubeconfig) as kube:
            pending = PendingPods(kube, _inventory(plane), lambda: datetime.now(UTC))
            return await pending.rivals(observed, replace(revision, hash="0123456789"))

    _waits(plane, "many", {"deviceClassName": "gpu.nvidia.com", "count": 5})
    _waits(plane, "nobodys", {"deviceClassName": "nic.example.com"})
    assert asyncio.run(rivals()) == (), "neither could start on what the rollout gives up"
    h200 = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA H200"'
    _waits(plane, "thief", {"deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": h200}}]})
    assert asyncio.run(rivals()) == ("a pod of another namespace",)
