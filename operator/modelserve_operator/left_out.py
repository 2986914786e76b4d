"""Why the nodes that are there offer a spec nothing, node by node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.node_labels import MEMORY_LABEL, PRODUCT_LABEL, named_gpu
from modelserve_operator.inventory import HOSTNAME_LABEL, Pool, pool_offers
from modelserve_operator.supply import Supply

MOST_NODES = 8
REMEDY = "Add GPU nodes, or name products of the catalogue in spec.accelerators.products."


def no_accelerators(spec: ModelServeSpec, supply: Supply, tolerations: Iterable[Mapping[str, Any]]) -> str:
    """The message of NoAccelerators: every node that names a GPU with what keeps it out, the first few by name."""
    allowed = tuple(tolerations)
    found = [
        (name, why)
        for pool, names in supply.nodes_of.items()
        for why in [_why(pool, spec, supply, allowed)]
        for name in names
    ]
    found += [
        (name, f"names {product}, but its allocatable {GPU_RESOURCE} is 0: is the device plugin running?")
        for name, product in supply.idle
    ]
    if not found:
        return f"No node names a GPU in its labels ({PRODUCT_LABEL}, or a cloud's own). {REMEDY}"
    shown = "; ".join(f"{name}: {why}" for name, why in sorted(found)[:MOST_NODES])
    more = f"; and {len(found) - MOST_NODES} more" if len(found) > MOST_NODES else ""
    return f"No node offers a GPU that the spec may use. {shown}{more}. {REMEDY}"


def _why(pool: Pool, spec: ModelServeSpec, supply: Supply, tolerations: tuple[Mapping[str, Any], ...]) -> str:
    return ", ".join(_reasons(pool, spec, supply, tolerations)) or "nothing of it can be planned"


def _reasons(
    pool: Pool, spec: ModelServeSpec, supply: Supply, tolerations: tuple[Mapping[str, Any], ...]
) -> Iterator[str]:
    have = dict(pool.labels)
    for taint in pool.taints:
        if not taint.tolerated(tolerations):
            text = f"{taint.key}{'=' if taint.value else ''}{taint.value}:{taint.effect}"
            yield f"taint {text} is not in spec.pod.tolerations"
    wanted = spec.accelerators.node_selector if spec.accelerators else {}
    for key, value in wanted.items():
        if key != HOSTNAME_LABEL and have.get(key) != value:
            yield f"label {key} is {have.get(key, 'absent')}, spec.accelerators.nodeSelector wants {value}"
    offers = pool_offers(pool, supply.catalogue)
    product = named_gpu(have) or "an unnamed GPU"
    if not offers:
        yield f"{product} is in no catalogue and the node has no label {MEMORY_LABEL}"
    products = spec.accelerators.products if spec.accelerators else None
    if offers and products is not None and not {offer.accelerator.product for offer in offers} & set(products):
        yield f"{product} is not in spec.accelerators.products"
