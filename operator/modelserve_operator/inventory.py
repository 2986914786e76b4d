"""GPU pools: sets of nodes that are alike in everything a plan may depend on. Pure.

Readiness, cordons and free capacity are no part of a pool: a plan must not change because a node restarts or because
our own pods moved in. What labels mean is the core's business (`modelserve.planning.node_labels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from modelserve.api import NodeSelectorRequirement, NodeSelectorTerm
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning import AcceleratorOffer, offers_from_nodes
from modelserve.planning.node_labels import INSTANCE_TYPE, PRODUCT_LABEL, node_gpus
from modelserve_operator.catalogue import Catalogue

HOSTNAME_LABEL = "kubernetes.io/hostname"
_PER_NODE_LABELS = frozenset({HOSTNAME_LABEL, "nvidia.com/gfd.timestamp"})  # would make a pool of every node
_GPU_VENDOR = GPU_RESOURCE.partition("/")[0] + "/"
_LIFECYCLE_TAINTS = "node.kubernetes.io/"  # not-ready, unreachable, unschedulable, pressure: they come and go

Body = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Taint:
    key: str
    value: str
    effect: str

    def tolerated(self, tolerations: Iterable[Body]) -> bool:
        """Kubernetes' rule: an empty key with Exists tolerates all, an empty effect every effect."""
        for toleration in tolerations:
            key, effect = toleration.get("key"), toleration.get("effect")
            if key not in (None, "", self.key) or effect not in (None, "", self.effect):
                continue
            if toleration.get("operator") == "Exists" or (key and (toleration.get("value") or "") == self.value):
                return True
        return False


def lasting_taints(spec: Body) -> tuple[Taint, ...]:
    """Taints of a node (or of a NodePool's template) that keep pods away for as long as it lives."""
    return tuple(
        sorted(
            Taint(taint["key"], taint.get("value") or "", taint["effect"])
            for taint in spec.get("taints") or ()
            if taint["effect"] != "PreferNoSchedule" and not taint["key"].startswith(_LIFECYCLE_TAINTS)
        )
    )


@dataclass(frozen=True, order=True)
class Pool:
    """Nodes with the same labels, taints and GPU resources (by name: whole GPUs and MIG slices)."""

    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...] = ()
    resources: tuple[tuple[str, str], ...] = ()

    def accepts(self, *, node_selector: Mapping[str, str], tolerations: Iterable[Body]) -> bool:
        """Whether pods with this selector and these tolerations may run here; host names are left to the scheduler."""
        have = dict(self.labels)
        wanted = {key: value for key, value in node_selector.items() if key != HOSTNAME_LABEL}
        allowed = tuple(tolerations)
        return all(have.get(key) == value for key, value in wanted.items()) and all(
            taint.tolerated(allowed) for taint in self.taints
        )


@lru_cache(maxsize=8192)  # every reconcile asks for every pool
def pool_offers(pool: Pool, catalogue: Catalogue) -> tuple[AcceleratorOffer, ...]:
    """What one node of the pool offers; several with mixed MIG, none for an unknown product without memory."""
    node = {"metadata": {"labels": dict(pool.labels)}, "status": {"allocatable": dict(pool.resources)}}
    return offers_from_nodes([node], catalogue.accelerators)


def pool_of(node: Body) -> Pool | None:
    """The pool a node belongs to; None for a node without a GPU that its labels name."""
    labels = node["metadata"].get("labels") or {}
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    if not any(gpus.count for gpus in node_gpus(labels, allocatable)):
        return None
    return Pool(
        labels=tuple(sorted((key, value) for key, value in labels.items() if key not in _PER_NODE_LABELS)),
        taints=lasting_taints(node.get("spec") or {}),
        resources=tuple(
            sorted((name, str(count)) for name, count in allocatable.items() if name.startswith(_GPU_VENDOR))
        ),
    )


class Inventory:
    """Pool of every node, kept up to date node by node."""

    def __init__(self) -> None:
        self._pool_of_node: dict[str, Pool] = {}
        self._pools: tuple[Pool, ...] | None = ()  # None: to be worked out again

    def hear(self, node: Body, *, deleted: bool) -> bool:
        """Note a node's state. True when its pool changed, that is when a plan might; heartbeats change nothing."""
        name = node["metadata"]["name"]
        before = self._pool_of_node.get(name)
        after = None if deleted else pool_of(node)
        if after is None:
            self._pool_of_node.pop(name, None)
        else:
            self._pool_of_node[name] = after
        if before != after:
            self._pools = None
        return before != after

    def names(self) -> set[str]:
        """Nodes that are in a pool."""
        return set(self._pool_of_node)

    def pools(self) -> tuple[Pool, ...]:
        """The distinct pools, in a fixed order."""
        if self._pools is None:
            self._pools = tuple(sorted(set(self._pool_of_node.values())))
        return self._pools


def named_labels(offer: AcceleratorOffer) -> dict[str, str]:
    """Labels by which an offer of a single pool names it."""
    expressions = (each for term in offer.node_selector_terms for each in term.match_expressions)
    return {each.key: each.values[0] for each in expressions if each.values}


def placement_terms(
    offered: Iterable[tuple[Pool, AcceleratorOffer]], *, all_pools: Iterable[Pool]
) -> tuple[NodeSelectorTerm, ...]:
    """One term per way to name the pools, in labels that an empty pool's provisioner knows where there are any.

    Those are the cloud's own GPU labels (in the offer), else the instance type. The GPU product is added where nodes
    with other GPUs carry the same ones.
    """
    everywhere = [dict(pool.labels) for pool in all_pools]
    products: dict[frozenset[tuple[str, str]], set[str | None]] = {}  # by provisioner labels: what nodes with them have
    terms: dict[NodeSelectorTerm, None] = {}
    for pool, offer in offered:
        labels = dict(pool.labels)
        known = named_labels(offer)
        if not known and INSTANCE_TYPE in labels:
            known = {INSTANCE_TYPE: labels[INSTANCE_TYPE]}
        product, ways = labels.get(PRODUCT_LABEL), frozenset(known.items())
        if ways not in products:
            products[ways] = {other.get(PRODUCT_LABEL) for other in everywhere if ways <= other.items()}
        if product is not None and len(products[ways]) > 1:
            known = {**known, PRODUCT_LABEL: product}
        terms[_term(known or {PRODUCT_LABEL: offer.accelerator.product})] = None
    return tuple(terms)


def _term(labels: Mapping[str, str]) -> NodeSelectorTerm:
    return NodeSelectorTerm(
        match_expressions=tuple(
            NodeSelectorRequirement(key=key, operator="In", values=(value,)) for key, value in labels.items()
        )
    )
