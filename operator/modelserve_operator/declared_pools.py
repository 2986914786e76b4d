"""Pools that may grow from nothing: of Karpenter, of the user's catalogue, and of products a spec names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.hardware import CPU_PRODUCT
from modelserve.planning import AcceleratorOffer, offers_from_node_pool
from modelserve.planning.wishes import MAX_GPUS_PER_REPLICA
from modelserve_operator.catalogue import Catalogue
from modelserve_operator.inventory import HOSTNAME_LABEL, lasting_taints, named_labels

# Labels in these domains a provisioner sets by itself; others exist only where a NodePool states them.
PROVISIONED_DOMAINS = (
    "kubernetes.io/", "topology.kubernetes.io/", "node.kubernetes.io/", "karpenter.sh/", "karpenter.k8s.aws/",
    "eks.amazonaws.com/", "cloud.google.com/", "kubernetes.azure.com/",
)  # fmt: skip

Body = Mapping[str, Any]


def declared_offers(
    spec: ModelServeSpec, catalogue: Catalogue, node_pools: Iterable[Body], *, tolerations: Iterable[Body]
) -> list[AcceleratorOffer]:
    """Pools that a provisioner would grow for these pods, whether or not they have nodes now."""
    selector = spec.accelerators.node_selector if spec.accelerators else {}
    allowed = tuple(tolerations)
    offers = [offer for offer in catalogue.declared if _agrees(selector, named_labels(offer))]
    for body in node_pools:
        if _accepts(body, selector=selector, tolerations=allowed):
            offers += offers_from_node_pool(body, catalogue.accelerators)
    return offers


def named_offers(
    spec: ModelServeSpec, catalogue: Catalogue, existing: Iterable[AcceleratorOffer]
) -> list[AcceleratorOffer]:
    """Products of the catalogue that the spec names and nothing offers: a pool of them is taken on trust."""
    if spec.accelerators is None or spec.accelerators.products is None:
        return []
    present = {offer.accelerator.product for offer in existing}
    count = spec.accelerators.max_per_replica or MAX_GPUS_PER_REPLICA
    return [
        AcceleratorOffer(catalogue.accelerators[product], count, declared=True)
        for product in spec.accelerators.products
        if product in catalogue.accelerators and product not in present and product != CPU_PRODUCT
    ]


def _agrees(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key, value) == value for key, value in selector.items())


def _accepts(node_pool: Body, *, selector: Mapping[str, str], tolerations: tuple[Body, ...]) -> bool:
    """Whether the pool's nodes would carry the selector's labels and let the pods in."""
    template = (node_pool.get("spec") or {}).get("template") or {}
    spec = template.get("spec") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    stated = {each["key"]: each for each in spec.get("requirements") or ()}
    for key, value in selector.items():
        if key == HOSTNAME_LABEL:
            continue
        if key in labels:
            fits = labels[key] == value
        elif key in stated:
            named = value in (stated[key].get("values") or ())
            fits = {"In": named, "NotIn": not named, "DoesNotExist": False}.get(stated[key].get("operator"), True)
        else:
            fits = key.startswith(PROVISIONED_DOMAINS)
        if not fits:
            return False
    return all(taint.tolerated(tolerations) for taint in lasting_taints(spec))
