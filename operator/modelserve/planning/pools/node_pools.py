"""Pools that Karpenter may grow, from the requirements of NodePool objects (karpenter.sh/v1).

Read are `In`, `Gt` and `Lt` requirements, and template labels, that name GPUs: instance-gpu-name, instance-gpu-count
and instance-gpu-memory under karpenter.k8s.aws or eks.amazonaws.com, cloud.google.com/gke-accelerator, and
nvidia.com/gpu.product, and kubernetes.io/arch, which names their CPUs; where nothing does, they are those that the GPU
usually comes with. A NodePool that does not name its GPUs declares nothing: what it would bring is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from modelserve.hardware import AMD64, ARCH_LABEL, ARM64, CATALOGUE, GPU_RESOURCE, Accelerator
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.eligibility import lasting_taints
from modelserve.planning.pools.node_labels import (
    AWS_PREFIXES,
    GKE_COUNT,
    GKE_PRODUCT,
    GKE_PRODUCTS,
    PRODUCT_LABEL,
    aws_product,
    whole,
)
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.pools.pinning import pinned_terms

NODE_POOL_LABEL = "karpenter.sh/nodepool"
LARGEST_NODE = 8  # GPUs of the largest node a pool may bring, where no requirement bounds them


def offers_from_node_pool(
    node_pool: Mapping[str, Any], catalogue: Mapping[str, Accelerator] = CATALOGUE
) -> tuple[AcceleratorOffer, ...]:
    """One declared offer for each product that the pool's requirements name; empty for other pools, odd bodies, and a
    pool whose limits are 0.
    """
    template = mapping(mapping(node_pool.get("spec")).get("template"))
    labels = mapping(mapping(template.get("metadata")).get("labels"))
    spec = mapping(template.get("spec"))
    stated = requirements(spec)
    name = str(mapping(node_pool.get("metadata")).get("name") or "")
    count = _largest_count(stated)
    limits = mapping(mapping(node_pool.get("spec")).get("limits"))
    if any(str(limits.get(resource)) == "0" for resource in ("cpu", "memory", GPU_RESOURCE)):
        return ()  # switched off: it brings no node
    limit = whole(limits.get(GPU_RESOURCE))
    named = stated_architectures(stated, labels)
    found: dict[tuple[str, str], AcceleratorOffer] = {}
    for product, key, value in _named_products(stated, labels):
        accelerator = catalogue.get(product)
        if accelerator is None or any(known == product for known, _ in found):
            continue
        pairs = [(key, value), *([(NODE_POOL_LABEL, name)] if name else [])]
        for cpus in named or (accelerator.architecture,):
            found[product, cpus] = AcceleratorOffer(
                replace(accelerator, architecture=cpus),
                min(count, limit) if limit else count,
                pinned_terms(pairs, product=product, architecture=cpus),
                declared=True,
                taints=tuple(map(str, lasting_taints(spec))),
            )
    return tuple(found[key] for key in sorted(found))


def stated_architectures(stated: list[dict[str, Any]], labels: Mapping[str, Any]) -> tuple[str, ...]:
    """CPUs of the nodes that a pool brings, by its template's label or requirement; none where it leaves them open."""
    if labels.get(ARCH_LABEL):
        return (str(labels[ARCH_LABEL]),)
    open_to = [AMD64, ARM64]
    for each in stated:
        if each.get("key") == ARCH_LABEL and each.get("operator", "In") in ("In", "NotIn"):
            values, wanted = stated_values(each), each.get("operator", "In") == "In"
            open_to = values if wanted else [cpus for cpus in open_to if cpus not in values]
            return tuple(dict.fromkeys(open_to))
    return ()


def _named_products(requirements: list[dict[str, Any]], labels: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(product, label, value) of every GPU named, in whichever provisioner's words."""
    memory = max((bound for each in requirements for bound in _memory_bounds(each)), default=0)
    values = [(str(each.get("key")), value) for each in requirements for value in _in_values(each)]
    values += [(str(key), str(value)) for key, value in labels.items()]
    for key, value in values:
        if key in {f"{prefix}name" for prefix in AWS_PREFIXES}:
            yield aws_product(value, memory_mib=memory), key, value
        elif key == GKE_PRODUCT:
            yield GKE_PRODUCTS.get(value, value), key, value
        elif key == PRODUCT_LABEL:
            yield value, key, value


def _memory_bounds(requirement: Mapping[str, Any]) -> list[int]:
    named = requirement.get("key") in {f"{prefix}memory" for prefix in AWS_PREFIXES}
    return (
        [whole(value) for value in stated_values(requirement)] if named and requirement.get("operator") != "Lt" else []
    )


def _largest_count(requirements: list[dict[str, Any]]) -> int:
    """GPUs of the largest node that the requirements allow."""
    keys = {f"{prefix}count" for prefix in AWS_PREFIXES} | {GKE_COUNT}
    largest = LARGEST_NODE
    for each in requirements:
        numbers = [whole(value) for value in stated_values(each)] if each.get("key") in keys else []
        if numbers and each.get("operator") == "In":
            largest = max(numbers)
        elif numbers and each.get("operator") == "Lt":
            largest = min(largest, numbers[0] - 1)
    return max(1, min(largest, 64))


def _in_values(requirement: Mapping[str, Any]) -> list[str]:
    return stated_values(requirement) if requirement.get("operator", "In") == "In" else []


def requirements(template_spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Requirements of a pool's template; those that are none are left out."""
    stated = template_spec.get("requirements")
    return [each for each in stated if isinstance(each, dict)] if isinstance(stated, list) else []


def stated_values(requirement: Mapping[str, Any]) -> list[str]:
    """Values of a requirement, 64 at most."""
    values = requirement.get("values")
    return [str(value)[:63] for value in values[:64]] if isinstance(values, list) else []
