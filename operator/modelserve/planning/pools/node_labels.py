"""The GPUs of a node, as its labels name them: by GPU feature discovery, or by the cloud that made the node.

GPU feature discovery   nvidia.com/gpu.product, .memory (MiB), .count, .compute.major/.minor; MIG strategy single
                        gives product-MIG-PROFILE there, mixed gives nvidia.com/mig-PROFILE.count and .memory
GKE                     cloud.google.com/gke-accelerator, gke-accelerator-count, gke-gpu-partition-size,
                        gke-gpu-sharing-strategy, gke-max-shared-clients-per-gpu
Karpenter on AWS        karpenter.k8s.aws/instance-gpu-name, -count, -memory (MiB), -manufacturer
EKS Auto Mode           eks.amazonaws.com/instance-gpu-*, the same
AKS                     kubernetes.azure.com/accelerator = nvidia, with the VM size in the instance-type label
elsewhere on AWS, Azure node.kubernetes.io/instance-type alone (planning/pools/instance_types.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.pools.instance_types import INSTANCE_TYPES, PRODUCT_OF_TYPE

PRODUCT_LABEL = "nvidia.com/gpu.product"
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
COUNT_LABEL = "nvidia.com/gpu.count"
COMPUTE_LABELS = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
SHARING_LABEL = "nvidia.com/gpu.sharing-strategy"
GKE_PRODUCT = "cloud.google.com/gke-accelerator"
GKE_COUNT = "cloud.google.com/gke-accelerator-count"
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
GKE_SHARING = "cloud.google.com/gke-gpu-sharing-strategy"
AWS_PREFIXES = ("karpenter.k8s.aws/instance-gpu-", "eks.amazonaws.com/instance-gpu-")
AKS_ACCELERATOR = "kubernetes.azure.com/accelerator"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

GKE_PRODUCTS = {
    "nvidia-tesla-t4": "Tesla-T4",
    "nvidia-tesla-a100": "NVIDIA-A100-SXM4-40GB",
    "nvidia-a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "nvidia-l4": "NVIDIA-L4",
    "nvidia-rtx-pro-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "nvidia-h100-80gb": "NVIDIA-H100-80GB-HBM3",
    "nvidia-h100-mega-80gb": "NVIDIA-H100-80GB-HBM3",
    "nvidia-h200-141gb": "NVIDIA-H200",
    "nvidia-b200": "NVIDIA-B200",
}
AWS_PRODUCTS = {
    "t4": "Tesla-T4",
    "a10g": "NVIDIA-A10G",
    "l4": "NVIDIA-L4",
    "l40s": "NVIDIA-L40S",
    "a100": "NVIDIA-A100-SXM4-40GB",  # its 80 GB form is told by the memory label
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
}
AKS_PRODUCTS = {  # of NC sizes, whose GPUs are PCIe boards
    "T4": "Tesla-T4",
    "A10": "NVIDIA-A10",
    "A100": "NVIDIA-A100-80GB-PCIe",
    "H100": "NVIDIA-H100-NVL",
    "H200": "NVIDIA-H200",
}
AKS_ND_PRODUCTS = {  # of ND sizes, whose GPUs are SXM modules
    "A100": "NVIDIA-A100-SXM4-80GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H200": "NVIDIA-H200",
}
_AWS_A100 = "a100"
_AWS_A100_80GB = "NVIDIA-A100-SXM4-80GB"
_AWS_LARGE_MIB = 70_000
_MIG_LABEL = re.compile(r"nvidia\.com/(mig-[0-9]+g\.[0-9]+gb(?:\.me)?)\.count")
_MIG_PRODUCT = re.compile(r"-MIG-[0-9]+g\.[0-9]+gb")
_SHARED_SUFFIX = "-SHARED"


@dataclass(frozen=True)
class NodeGpus:
    """GPUs, or slices, of one product on one node. Memory is 0 and the capability (0, 0) where no label says."""

    product: str
    count: int
    memory_mib: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    resource_name: str = GPU_RESOURCE
    selector: tuple[tuple[str, str], ...] = ()  # labels that name such nodes before they exist
    refused: str | None = None  # why no replica can be planned on them


def named_gpu(labels: Mapping[str, str]) -> str | None:
    """What the labels call the node's GPU, whether or not one is allocatable; None where no label names one."""
    cloud = (GKE_PRODUCT, *(f"{prefix}name" for prefix in AWS_PREFIXES))
    return next((labels[key] for key in (PRODUCT_LABEL, *cloud) if labels.get(key)), None)


def is_mig_slice(product: str) -> bool:
    """Whether the product is a part of a GPU: slices cannot talk to each other, so a replica has one."""
    return _MIG_PRODUCT.search(product) is not None


def whole(text: object) -> int:
    """A label's or resource's whole number; 0 when there is none, or something else stands there."""
    shown = str(text)
    return int(shown) if shown.isascii() and shown.isdecimal() and len(shown) < 10 else 0


def node_gpus(labels: Mapping[str, str], allocatable: Mapping[str, object]) -> tuple[NodeGpus, ...]:
    """What the node offers; empty where no label names a GPU. Several with the mixed MIG strategy."""
    cloud = _cloud_gpus(labels, allocatable)
    selector = cloud.selector if cloud else ()
    slices = tuple(_mixed_slices(labels, allocatable, selector))
    if labels.get(PRODUCT_LABEL):
        discovered = _discovered(labels, allocatable, selector)
        return ((discovered, *slices) if discovered.count else slices) if discovered else slices
    if cloud is not None and cloud.count:
        return (cloud, *slices)
    return slices


def _discovered(
    labels: Mapping[str, str], allocatable: Mapping[str, object], selector: tuple[tuple[str, str], ...]
) -> NodeGpus:
    # A device plugin that has not registered yet leaves no resource; the label says what will come.
    product = str(labels[PRODUCT_LABEL])
    major, minor = (whole(labels.get(label)) for label in COMPUTE_LABELS)
    refused = _sharing(labels)
    if refused and not product.endswith(_SHARED_SUFFIX):
        product += _SHARED_SUFFIX
    return NodeGpus(
        product=product,
        count=whole(allocatable.get(GPU_RESOURCE, labels.get(COUNT_LABEL))),
        memory_mib=whole(labels.get(MEMORY_LABEL)),
        compute_capability=(major, minor) if major else (0, 0),
        selector=selector,
        refused=refused,
    )


def _sharing(labels: Mapping[str, str]) -> str | None:
    strategy = labels.get(SHARING_LABEL) or labels.get(GKE_SHARING) or ""
    replicas = whole(labels.get(REPLICAS_LABEL))
    named = str(labels.get(PRODUCT_LABEL, "")).endswith(_SHARED_SUFFIX)
    if strategy in ("", "none") and replicas < 2 and not named:
        return None
    how = strategy if strategy not in ("", "none") else "time-slicing"
    times = f" into {replicas}" if replicas > 1 else ""
    return (
        f"the GPU is shared by {how}{times}: its memory is not partitioned, so no pool can be promised; use whole "
        "GPUs or MIG slices"
    )


def _mixed_slices(
    labels: Mapping[str, str], allocatable: Mapping[str, object], selector: tuple[tuple[str, str], ...]
) -> Iterator[NodeGpus]:
    base = str(labels.get(PRODUCT_LABEL) or "NVIDIA-GPU").removesuffix(_SHARED_SUFFIX)
    major, minor = (whole(labels.get(label)) for label in COMPUTE_LABELS)
    for label in sorted(labels):
        match = _MIG_LABEL.fullmatch(label)
        if match is None:
            continue
        resource = f"nvidia.com/{match[1]}"
        count = whole(allocatable.get(resource, labels[label]))
        if count:
            yield NodeGpus(
                product=f"{base}-{match[1].replace('mig-', 'MIG-')}",
                count=count,
                memory_mib=whole(labels.get(f"{resource}.memory")),
                compute_capability=(major, minor) if major else (0, 0),
                resource_name=resource,
                selector=selector,
            )


def _cloud_gpus(labels: Mapping[str, str], allocatable: Mapping[str, object]) -> NodeGpus | None:
    """The GPUs as the cloud's own labels name them; an unknown name is kept, for its memory may be labelled."""
    registered = whole(allocatable.get(GPU_RESOURCE))
    if name := labels.get(GKE_PRODUCT):
        partition = labels.get(GKE_PARTITION)
        product = GKE_PRODUCTS.get(name, name) + (f"-MIG-{partition}" if partition else "")
        count, refused = registered or whole(labels.get(GKE_COUNT)), _sharing(labels)
        selector = tuple((key, labels[key]) for key in (GKE_PRODUCT, GKE_PARTITION) if labels.get(key))
        return NodeGpus(product + _SHARED_SUFFIX * bool(refused), count, selector=selector, refused=refused)
    for prefix in AWS_PREFIXES:
        if name := labels.get(f"{prefix}name"):
            memory, count = whole(labels.get(f"{prefix}memory")), registered or whole(labels.get(f"{prefix}count"))
            product = aws_product(name, memory_mib=memory)
            known = name in AWS_PRODUCTS
            selector = ((f"{prefix}name", name),)
            if name == _AWS_A100 and memory:  # one name for two memories
                selector += ((f"{prefix}memory", str(labels[f"{prefix}memory"])),)
            return NodeGpus(product, count, 0 if known else memory, selector=selector)
    if labels.get(AKS_ACCELERATOR) == "nvidia" and (size := labels.get(INSTANCE_TYPE)):
        parts = size.split("_")
        products = AKS_ND_PRODUCTS if any(part.startswith("ND") for part in parts) else AKS_PRODUCTS
        found = next((products[part] for part in parts if part in products), None)
        if found:
            return NodeGpus(found, registered, selector=((INSTANCE_TYPE, size),))
    size = labels.get(INSTANCE_TYPE, "")
    if size in PRODUCT_OF_TYPE:
        return NodeGpus(PRODUCT_OF_TYPE[size], registered, selector=((INSTANCE_TYPE, size),))
    return None


def published_labels(product: str) -> Iterator[tuple[tuple[str, tuple[str, ...]], ...]]:
    """The ways in which nodes with this GPU are named before they exist: by each cloud's label, or by the machine's
    type. Each is a set of labels with the values that they may have.
    """
    named = tuple(name for name, known in GKE_PRODUCTS.items() if known == product)
    if named:
        yield ((GKE_PRODUCT, named),)
    for prefix in AWS_PREFIXES:
        if product == _AWS_A100_80GB:
            yield (f"{prefix}name", (_AWS_A100,)), (f"{prefix}memory", ("81920",))
        elif product == AWS_PRODUCTS[_AWS_A100]:
            yield (f"{prefix}name", (_AWS_A100,)), (f"{prefix}memory", ("40960",))
        elif names := tuple(name for name, known in AWS_PRODUCTS.items() if known == product):
            yield ((f"{prefix}name", names),)
    if types := INSTANCE_TYPES.get(product):
        yield ((INSTANCE_TYPE, types),)


def aws_product(name: str, *, memory_mib: int = 0) -> str:
    """GPU feature discovery's name of the GPU that AWS labels call `name`; memory tells the two A100 apart."""
    if name == _AWS_A100 and memory_mib >= _AWS_LARGE_MIB:
        return _AWS_A100_80GB
    return AWS_PRODUCTS.get(name, name)
