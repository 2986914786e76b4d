"""What a cluster offers a plan: accelerators by product and number per node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.api.status import NodeSelectorTerm
from modelserve.hardware import CPU, GPU_RESOURCE, Accelerator, accelerator_from_labels

PRODUCT_LABEL = "nvidia.com/gpu.product"
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
COUNT_LABEL = "nvidia.com/gpu.count"
COMPUTE_LABELS = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")


@dataclass(frozen=True)
class AcceleratorOffer:
    """One pool of like nodes. `count` is the GPUs of one node, not the free ones; 0 for the CPU.

    `node_selector_terms` name the pool in labels its provisioner knows; empty means the product label.
    """

    accelerator: Accelerator
    count: int
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


CPU_OFFER = AcceleratorOffer(CPU, count=0)


def offers_from_nodes(nodes: Iterable[Mapping[str, Any]]) -> tuple[AcceleratorOffer, ...]:
    """Offers of Node objects: one for each product and GPUs per node, from the labels of GPU feature discovery.

    Nodes without a product label, and unknown products without a memory label, offer nothing.
    """
    found: dict[AcceleratorOffer, None] = {}
    for node in nodes:
        labels = node.get("metadata", {}).get("labels") or {}
        allocatable = node.get("status", {}).get("allocatable") or {}
        count = _whole(allocatable.get(GPU_RESOURCE, labels.get(COUNT_LABEL)))
        product = labels.get(PRODUCT_LABEL)
        major, minor = (_whole(labels.get(label)) for label in COMPUTE_LABELS)
        accelerator = accelerator_from_labels(
            str(product),
            memory_mib=_whole(labels.get(MEMORY_LABEL)) or None,
            compute_capability=(major, minor) if major else None,
        )
        if product and count and accelerator:
            found[AcceleratorOffer(accelerator, count)] = None
    return tuple(sorted(found, key=lambda offer: (offer.accelerator.product, offer.count)))


def _whole(text: object) -> int:
    return int(str(text)) if str(text).isdecimal() else 0
