"""A large cluster's nodes and ModelServes, made of a seed: what operator_scale.py fills an API server with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from modelserve.hardware import CATALOGUE

NAMESPACE = "scale"
ZONES = ("a", "b", "c")
SIZES = (1, 2, 4, 8)  # GPUs per node
MODELS = ("E2B-it", "E4B-it", "12B-it", "26B-A4B-it", "31B-it", "31B", "12B-it-qat-w4a16-ct")
CONTEXTS = (None, 8_192, 32_768, 65_536, 131_072)
OBJECTIVES = (None, "Latency", "Throughput", "MaxContext")
PRODUCTS = tuple(product for product in CATALOGUE if product != "CPU")[:12]


def nodes(count: int) -> Iterator[dict[str, Any]]:
    """Nodes as GPU feature discovery labels them: 12 products, each with 1 to 8 GPUs in three zones.

    Every node has a label of its own, as many provisioners set one.
    """
    for number in range(count):
        product = PRODUCTS[number % len(PRODUCTS)]
        gpus = SIZES[number // len(PRODUCTS) % len(SIZES)]
        yield {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": f"gpu-{number:05d}",
                "labels": _node_labels(number, product, gpus, ZONES[number % len(ZONES)]),
            },
            "status": {
                "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)},
                "capacity": {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)},
                "conditions": [heartbeat(0)],
                "nodeInfo": _node_info(number),
            },
        }


def heartbeat(second: int) -> dict[str, str]:
    """The Ready condition of a node that is well, as its kubelet posts it again every few minutes."""
    return {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "kubelet is posting ready status",
        "lastHeartbeatTime": f"2026-01-01T{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def _node_labels(number: int, product: str, gpus: int, zone: str) -> dict[str, str]:
    accelerator = CATALOGUE[product]
    major, minor = accelerator.compute_capability
    return {
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": f"gpu-{number:05d}",
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": f"{product.lower()[:40]}-{gpus}x",
        "topology.kubernetes.io/region": "region-1",
        "topology.kubernetes.io/zone": f"region-1{zone}",
        "provisioner.example/machine-id": f"machine-{number:05d}",
        "feature.node.kubernetes.io/cpu-model.vendor_id": "Intel",
        "feature.node.kubernetes.io/kernel-version.full": "6.8.0-1021",
        "nvidia.com/cuda.driver-version.major": "570",
        "nvidia.com/cuda.runtime-version.major": "12",
        "nvidia.com/gpu.compute.major": str(major),
        "nvidia.com/gpu.compute.minor": str(minor),
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.family": "ampere",
        "nvidia.com/gpu.machine": "server",
        "nvidia.com/gpu.memory": str(accelerator.memory_mib),
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/mig.capable": "false",
    }


def _node_info(number: int) -> dict[str, str]:
    named = ("architecture", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion")
    also = ("machineID", "operatingSystem", "osImage", "systemUUID")
    return dict.fromkeys((*named, *also), "") | {"bootID": f"boot-{number:05d}"}


def model_serves(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """ModelServes in PreviewOnly. Each has a served name and a pod label of its own, as those of many teams have."""
    rng = random.Random(seed)
    for number in range(count):
        name = f"serve-{number:05d}"
        yield {
            "apiVersion": "serving.modelserve.dev/v1alpha1",
            "kind": "ModelServe",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"team": f"team-{number % 97}"}},
            "spec": {
                "model": {"uri": f"hf://google/gemma-4-{rng.choice(MODELS)}", "servedName": name},
                "plan": {"mode": "PreviewOnly"},
                "pod": {"labels": {"team": f"team-{number % 97}"}},
                **wishes(rng),
            },
        }


def wishes(rng: random.Random) -> dict[str, Any]:
    """Fields that shape a plan, one of a few values each."""
    context, objective = rng.choice(CONTEXTS), rng.choice(OBJECTIVES)
    found: dict[str, Any] = {}
    if context is not None:
        found["context"] = {"maxModelLen": context}
    if objective is not None:
        found["objective"] = objective
    if rng.random() < 0.2:
        found["accelerators"] = {"products": sorted(rng.sample(PRODUCTS, 3))}
    return found


def edit(rng: random.Random) -> dict[str, Any]:
    """A merge patch that changes a spec: half of them to values that no other object has."""
    own = rng.random() < 0.5
    context = rng.randrange(4_096, 131_072) if own else rng.choice(CONTEXTS[1:])
    return {"spec": {"context": {"maxModelLen": context}, "objective": rng.choice(OBJECTIVES[1:])}}
