"""Names of a pool that hold for nodes to come: the labels that its provisioner knows, and the GPU that was sized."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.api.status import NodeSelectorRequirement, NodeSelectorTerm
from modelserve.hardware import ARCH_LABEL, GPU_RESOURCE
from modelserve.planning.pools.node_labels import PRODUCT_LABEL, published_labels


def pinned_terms(
    known: Iterable[tuple[str, str]],
    *,
    product: str | None,
    architecture: str | None = None,
    resource_name: str = GPU_RESOURCE,
) -> tuple[NodeSelectorTerm, ...]:
    """Two alternatives: the provisioner's labels `known` with the product label's value, and the same labels where no
    product label exists, so that an empty pool can grow.

    A node of another GPU that is added later fits neither. Without provisioner's labels there is the first alone;
    `product` None pins by them alone. MIG slices are named by profile: nodes that offer any number of them. The CPUs'
    `architecture` is in both; None: no label names that of the nodes.
    """
    provisioner = tuple(_is(key, value) for key, value in known if key != ARCH_LABEL)
    cpus = (_is(ARCH_LABEL, architecture),) if architecture else ()
    slices: tuple[NodeSelectorRequirement, ...] = ()
    if resource_name != GPU_RESOURCE:
        slices = (NodeSelectorRequirement(key=f"{resource_name}.count", operator="Gt", values=("0",)),)
    if product is None or any(each.key == PRODUCT_LABEL for each in provisioner):
        named = (*provisioner, *slices, *cpus)
        return (NodeSelectorTerm(match_expressions=named),) if named else ()
    here = NodeSelectorTerm(match_expressions=(*provisioner, _is(PRODUCT_LABEL, product), *slices, *cpus))
    if not provisioner:
        return (here,)
    unlabelled = NodeSelectorRequirement(key=PRODUCT_LABEL, operator="DoesNotExist")
    return here, NodeSelectorTerm(match_expressions=(*provisioner, unlabelled, *cpus))


def trusted_terms(product: str, architecture: str) -> tuple[NodeSelectorTerm, ...]:
    """Where pods may run on a product that no pool is known of: its own label or, where that does not exist, whatever a
    node group of a cloud publishes while it has no node. A GPU that no cloud is known to have has its label alone.
    """
    cpus = _is(ARCH_LABEL, architecture)
    here = NodeSelectorTerm(match_expressions=(_is(PRODUCT_LABEL, product), cpus))
    unlabelled = NodeSelectorRequirement(key=PRODUCT_LABEL, operator="DoesNotExist")
    published = [
        tuple(NodeSelectorRequirement(key=key, operator="In", values=values) for key, values in labels)
        for labels in published_labels(product)
    ]
    return here, *(NodeSelectorTerm(match_expressions=(*each, unlabelled, cpus)) for each in published)


def besides_architecture(terms: Iterable[NodeSelectorTerm] | None) -> tuple[NodeSelectorTerm, ...]:
    """Terms but for CPUs: those of plans of 0.2.0 and before say nothing of them, and name the same places."""
    bare = (
        tuple(each for each in term.match_expressions if each.key != ARCH_LABEL) for term in terms or ()
    )  # fmt: skip
    return tuple(NodeSelectorTerm(match_expressions=each) for each in bare if each)


def _is(key: str, value: str) -> NodeSelectorRequirement:
    return NodeSelectorRequirement(key=key, operator="In", values=(value,))
