"""Pools that may grow from nothing: of Karpenter, of the user's catalogue, and of products a spec names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelserve.api.spec import ModelServeSpec
from modelserve.hardware import ARCH_LABEL, CPU_PRODUCT, Accelerator
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.eligibility import HOSTNAME_LABEL, gpu_tolerations, lasting_taints, node_selector
from modelserve.planning.pools.node_pools import offers_from_node_pool, requirements, stated_values
from modelserve.planning.pools.offers import AcceleratorOffer, on_nodes
from modelserve.planning.pools.pinning import trusted_terms
from modelserve.planning.wishes import MAX_GPUS_PER_REPLICA

# Labels in these domains a provisioner sets by itself; others exist only where a NodePool states them.
PROVISIONED_DOMAINS = (
    "kubernetes.io/", "topology.kubernetes.io/", "node.kubernetes.io/", "karpenter.sh/", "karpenter.k8s.aws/",
    "eks.amazonaws.com/", "cloud.google.com/", "kubernetes.azure.com/",
)  # fmt: skip

Body = Mapping[str, Any]


def declared_offers(
    spec: ModelServeSpec,
    *,
    declared: Iterable[AcceleratorOffer],
    node_pools: Iterable[Body],
    catalogue: Mapping[str, Accelerator],
) -> list[AcceleratorOffer]:
    """Pools that a provisioner would grow for the pods of a spec, whether or not they have nodes now: those that the
    catalogue declares, and Karpenter's.
    """
    selector, tolerations = node_selector(spec), gpu_tolerations(spec)
    offers = [offer for offer in declared if _agrees(selector, _named_labels(offer))]
    for body in node_pools:
        if _accepts(body, selector=selector, tolerations=tolerations):
            offers += offers_from_node_pool(body, catalogue)
    cpus = selector.get(ARCH_LABEL)
    return [offer for offer in offers if cpus in (None, offer.accelerator.architecture)]


def named_offers(
    spec: ModelServeSpec, catalogue: Mapping[str, Accelerator], existing: Iterable[AcceleratorOffer]
) -> list[AcceleratorOffer]:
    """Products of the catalogue that the spec names and nothing offers: a pool of them is taken on trust."""
    if spec.accelerators is None or spec.accelerators.products is None:
        return []
    present = {offer.accelerator.product for offer in existing}
    count = spec.accelerators.max_per_replica or MAX_GPUS_PER_REPLICA
    selector = node_selector(spec)
    found = (
        on_nodes(catalogue[product], selector)
        for product in spec.accelerators.products
        if product in catalogue and product not in present and product != CPU_PRODUCT
    )
    return [
        AcceleratorOffer(each, count, trusted_terms(each.product, each.architecture), declared=True) for each in found
    ]


def _named_labels(offer: AcceleratorOffer) -> dict[str, str]:
    """Labels by which an offer of a single pool names it."""
    expressions = (each for term in offer.node_selector_terms for each in term.match_expressions)
    return {each.key: each.values[0] for each in expressions if each.operator == "In" and each.values}


def _agrees(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key, value) == value for key, value in selector.items())


def _accepts(node_pool: Body, *, selector: Mapping[str, str], tolerations: Iterable[Body]) -> bool:
    """Whether the pool's nodes would carry the selector's labels and let the pods in."""
    template = mapping(mapping(node_pool.get("spec")).get("template"))
    spec, labels = mapping(template.get("spec")), mapping(mapping(template.get("metadata")).get("labels"))
    stated = {str(each.get("key")): each for each in requirements(spec)}
    for key, value in selector.items():
        if key == HOSTNAME_LABEL:
            continue
        if key in labels:
            fits = labels[key] == value
        elif key in stated:
            named = value in stated_values(stated[key])
            fits = {"In": named, "NotIn": not named, "DoesNotExist": False}.get(str(stated[key].get("operator")), True)
        else:
            fits = key.startswith(PROVISIONED_DOMAINS)
        if not fits:
            return False
    return all(taint.tolerated(tolerations) for taint in lasting_taints(spec))
