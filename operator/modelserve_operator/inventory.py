"""GPU pools as their nodes' labels describe them. Pure.

A pool is a set of nodes that are alike in everything a plan may depend on. Readiness, cordons and free capacity are no
part of it: a plan must not change because a node restarts or because our own pods moved in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.offers import COMPUTE_LABELS, COUNT_LABEL, MEMORY_LABEL, PRODUCT_LABEL

HOSTNAME_LABEL = "kubernetes.io/hostname"
_PER_NODE_LABELS = frozenset({HOSTNAME_LABEL, "nvidia.com/gfd.timestamp"})  # would make a pool of every node

PROVISIONER_LABELS = (
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "eks.amazonaws.com/instance-gpu-name",
    "node.kubernetes.io/instance-type",
)
"""Labels that a node provisioner knows before a node exists, the most specific first."""

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


@dataclass(frozen=True, order=True)
class Pool:
    """Nodes with the same GPUs, labels and taints. Memory and compute capability are 0 where no label says."""

    product: str
    gpus_per_node: int
    memory_mib: int
    compute_capability: tuple[int, int]
    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...]

    def accepts(self, *, node_selector: Mapping[str, str], tolerations: Iterable[Body]) -> bool:
        """Whether pods with this selector and these tolerations may run here; host names are left to the scheduler."""
        have = dict(self.labels)
        wanted = {key: value for key, value in node_selector.items() if key != HOSTNAME_LABEL}
        allowed = tuple(tolerations)
        return all(have.get(key) == value for key, value in wanted.items()) and all(
            taint.tolerated(allowed) for taint in self.taints
        )


def pool_of(node: Body) -> Pool | None:
    """The pool a node belongs to; None for a node without a GPU that its labels name."""
    labels = node["metadata"].get("labels") or {}
    product = labels.get(PRODUCT_LABEL)
    if not product:
        return None
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    # A device plugin that has not registered yet leaves no resource; the label says what will come.
    count = _number(allocatable.get(GPU_RESOURCE, labels.get(COUNT_LABEL)))
    if count < 1:
        return None
    taints = (
        Taint(taint["key"], taint.get("value") or "", taint["effect"])
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint["effect"] != "PreferNoSchedule" and not taint["key"].startswith(_LIFECYCLE_TAINTS)
    )
    return Pool(
        product=product,
        gpus_per_node=count,
        memory_mib=_number(labels.get(MEMORY_LABEL)),
        compute_capability=(_number(labels.get(COMPUTE_LABELS[0])), _number(labels.get(COMPUTE_LABELS[1]))),
        labels=tuple(sorted((key, value) for key, value in labels.items() if key not in _PER_NODE_LABELS)),
        taints=tuple(sorted(taints)),
    )


def _number(text: object) -> int:
    """A label's or resource's whole number; 0 when there is none, or something else stands there."""
    return int(str(text)) if str(text).isdecimal() else 0


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

    def pools(self) -> tuple[Pool, ...]:
        """The distinct pools, in a fixed order."""
        if self._pools is None:
            self._pools = tuple(sorted(set(self._pool_of_node.values())))
        return self._pools


def node_selector_terms(pools: Iterable[Pool], *, all_pools: Iterable[Pool]) -> list[dict[str, Any]]:
    """One term per way to name the pools, in labels that an empty pool's provisioner knows where there are any.

    The GPU product is added where nodes with other GPUs carry the same provisioner label.
    """
    products: dict[tuple[str, str], set[str]] = {}  # by provisioner label: the products of the nodes that carry it
    for pool in all_pools:
        for label in pool.labels:
            if label[0] in PROVISIONER_LABELS:
                products.setdefault(label, set()).add(pool.product)
    terms: dict[tuple[tuple[str, str], ...], None] = {}
    for pool in sorted(pools):
        labels = dict(pool.labels)
        known = next(((key, labels[key]) for key in PROVISIONER_LABELS if key in labels), None)
        product = (PRODUCT_LABEL, pool.product)
        if known is None:
            term: tuple[tuple[str, str], ...] = (product,)
        elif len(products[known]) > 1:
            term = (known, product)
        else:
            term = (known,)
        terms[term] = None
    return [
        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]} for key, value in term]}
        for term in terms
    ]
