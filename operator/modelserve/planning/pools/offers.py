"""What a cluster offers a plan: accelerators by product and number per node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserve.api.schema_types import LABEL_KEY_PATTERN, LABEL_VALUE_PATTERN
from modelserve.api.status import NodeSelectorTerm
from modelserve.hardware import ARCH_LABEL, CATALOGUE, CPU, GPU_RESOURCE, Accelerator, accelerator_from_labels
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.eligibility import lasting_taints
from modelserve.planning.pools.host_capacity import UNKNOWN, HostCapacity, host_capacity, largest
from modelserve.planning.pools.node_labels import (
    COMPUTE_LABELS,
    COUNT_LABEL,
    INSTANCE_TYPE,
    MEMORY_LABEL,
    PRODUCT_LABEL,
    NodeGpus,
    is_mig_slice,
    node_gpus,
)
from modelserve.planning.pools.pinning import pinned_terms

__all__ = [
    "COMPUTE_LABELS",
    "COUNT_LABEL",
    "CPU_OFFER",
    "MEMORY_LABEL",
    "PRODUCT_LABEL",
    "AcceleratorOffer",
    "offers_from_nodes",
]

MAX_PRODUCT = 63
MIG_COMPUTE_SLICES = 7  # of a whole GPU
_MIG_PROFILE = re.compile(r"-MIG-(?P<slices>[0-9]+)g\.(?P<memory>[0-9]+)gb")


@dataclass(frozen=True)
class AcceleratorOffer:
    """One pool of like nodes. `count` is the GPUs of one node, not the free ones; 0 for the CPU.

    `node_selector_terms` name the pool, its nodes to come included (`pinned_terms`); empty means the product label.
    """

    accelerator: Accelerator
    count: int
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()
    resource_name: str = GPU_RESOURCE  # what a pod asks for
    refused: str | None = None  # why nothing can be planned here, such as time-slicing
    declared: bool = False  # the pool may have no node yet
    taints: tuple[str, ...] = ()  # KEY=VALUE:EFFECT that a pod must tolerate
    host: HostCapacity = UNKNOWN  # the most of each that a node has

    @property
    def largest_replica(self) -> int:
        """GPUs that one replica may have here: MIG slices cannot talk to each other, so one of those."""
        return min(self.count, 1) if is_mig_slice(self.accelerator.product) else self.count


CPU_OFFER = AcceleratorOffer(CPU, count=0)


def offers_from_nodes(
    nodes: Iterable[Mapping[str, Any]], catalogue: Mapping[str, Accelerator] = CATALOGUE
) -> tuple[AcceleratorOffer, ...]:
    """Offers of Node objects: one for each product, GPUs per node, way to name the pool, and set of taints.

    Nodes whose labels name no GPU, and unknown products without a memory label, offer nothing.
    """
    found: dict[AcceleratorOffer, list[HostCapacity]] = {}
    for node in nodes:
        labels = _labels(mapping(node.get("metadata")).get("labels"))
        allocatable = mapping(mapping(node.get("status")).get("allocatable"))
        taints = tuple(map(str, lasting_taints(node.get("spec"))))
        for gpus in node_gpus(labels, allocatable):
            made = _accelerator(gpus, catalogue)
            if made is None or not gpus.count:
                continue
            offer = AcceleratorOffer(
                on_nodes(made, labels),
                gpus.count,
                _terms(gpus, labels, catalogue),
                gpus.resource_name,
                gpus.refused,
                taints=taints,
            )
            found.setdefault(offer, []).append(host_capacity(allocatable))
    offers = (replace(offer, host=largest(hosts)) for offer, hosts in found.items())
    return tuple(sorted(offers, key=lambda offer: (offer.accelerator.product, offer.count, str(offer))))


def on_nodes(accelerator: Accelerator, labels: Mapping[str, str]) -> Accelerator:
    """It, beside the CPUs that the labels of its nodes name; where they name none, those that it usually has."""
    named = labels.get(ARCH_LABEL) or accelerator.architecture
    return accelerator if named == accelerator.architecture else replace(accelerator, architecture=named)


def _accelerator(gpus: NodeGpus, catalogue: Mapping[str, Accelerator]) -> Accelerator | None:
    product = gpus.product[:MAX_PRODUCT].rstrip("-._")
    capability = gpus.compute_capability if gpus.compute_capability[0] else None
    profile = _MIG_PROFILE.search(product)
    parent = catalogue.get(product.removesuffix("-SHARED").split("-MIG-")[0])
    if profile is None:
        memory = gpus.memory_mib or (parent.memory_mib if parent and product not in catalogue else 0)
    else:  # where no label says, the profile's name does; it rounds up, by 5 % at most
        memory = gpus.memory_mib or int(profile["memory"]) * 1024 * 95 // 100
    if capability is None and parent is not None:
        capability = parent.compute_capability
    made = accelerator_from_labels(
        product, memory_mib=memory or None, compute_capability=capability, catalogue=catalogue
    )
    if made is None or parent is None or profile is None:
        return made
    share = min(1.0, memory / parent.memory_mib)
    compute = min(1.0, int(profile["slices"]) / MIG_COMPUTE_SLICES)
    return replace(made, bandwidth=parent.bandwidth * share, flops=parent.flops * compute)


def _terms(
    gpus: NodeGpus, labels: Mapping[str, str], catalogue: Mapping[str, Accelerator]
) -> tuple[NodeSelectorTerm, ...]:
    """The pool in the labels its provisioner knows (the cloud's own GPU labels, else the instance type) and its GPU.

    Where only the cloud names a GPU, and in a word that is not known, that word is all there is to go by.
    """
    known = gpus.selector or tuple((key, labels[key]) for key in (INSTANCE_TYPE,) if key in labels)
    product = labels.get(PRODUCT_LABEL)
    if product is None and gpus.product.split("-MIG-")[0] in catalogue:
        product = gpus.product
    return pinned_terms(known, product=product, architecture=labels.get(ARCH_LABEL), resource_name=gpus.resource_name)


def _labels(value: object) -> dict[str, str]:
    """The labels that are label-like: text a selector may name."""
    return {
        key: text
        for key, text in mapping(value).items()
        if isinstance(key, str) and isinstance(text, str) and len(key) <= 317 and len(text) <= MAX_PRODUCT
        and re.fullmatch(LABEL_KEY_PATTERN, key) and re.fullmatch(LABEL_VALUE_PATTERN, text)
    }  # fmt: skip
