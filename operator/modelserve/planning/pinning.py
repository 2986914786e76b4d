"""Names of a pool that hold for nodes to come: the labels that its provisioner knows, and the GPU that was sized."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.api.status import NodeSelectorRequirement, NodeSelectorTerm
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.node_labels import PRODUCT_LABEL, published_labels


def pinned_terms(
    known: Iterable[tuple[str, str]], *, product: str | None, resource_name: str = GPU_RESOURCE
) -> tuple[NodeSelectorTerm, ...]:
    """Two alternatives: the provisioner's labels `known` with the product label's value, and the same labels where no
    product label exists, so that an empty pool can grow.

    A node of another GPU that is added later fits neither. Without provisioner's labels there is the first alone;
    `product` None pins by them alone. MIG slices are named by profile: nodes that offer any number of them.
    """
    provisioner = tuple(_is(key, value) for key, value in known)
    slices: tuple[NodeSelectorRequirement, ...] = ()
    if resource_name != GPU_RESOURCE:
        slices = (NodeSelectorRequirement(key=f"{resource_name}.count", operator="Gt", values=("0",)),)
    if product is None or any(each.key == PRODUCT_LABEL for each in provisioner):
        named = (*provisioner, *slices)
        return (NodeSelectorTerm(match_expressions=named),) if named else ()
    here = NodeSelectorTerm(match_expressions=(*provisioner, _is(PRODUCT_LABEL, product), *slices))
    if not provisioner:
        return (here,)
    unlabelled = NodeSelectorRequirement(key=PRODUCT_LABEL, operator="DoesNotExist")
    return here, NodeSelectorTerm(match_expressions=(*provisioner, unlabelled))


def trusted_terms(product: str) -> tuple[NodeSelectorTerm, ...]:
    """Where pods may run on a product that no pool is known of: its own label or, where that does not exist, whatever a
    node group of a cloud publishes while it has no node. A GPU that no cloud is known to have has its label alone.
    """
    here = NodeSelectorTerm(match_expressions=(_is(PRODUCT_LABEL, product),))
    unlabelled = NodeSelectorRequirement(key=PRODUCT_LABEL, operator="DoesNotExist")
    published = [
        tuple(NodeSelectorRequirement(key=key, operator="In", values=values) for key, values in labels)
        for labels in published_labels(product)
    ]
    return here, *(NodeSelectorTerm(match_expressions=(*each, unlabelled)) for each in published)


def _is(key: str, value: str) -> NodeSelectorRequirement:
    return NodeSelectorRequirement(key=key, operator="In", values=(value,))
