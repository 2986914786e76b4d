"""Explains, node by node, why the nodes that are there offer a spec nothing. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from modelserve.api import ModelServeSpec
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.pools.eligibility import HOSTNAME_LABEL, gpu_tolerations, node_selector
from modelserve.planning.pools.node_labels import MEMORY_LABEL, PRODUCT_LABEL, named_gpu
from modelserve_operator.inventory.pools import Pool, pool_offers
from modelserve_operator.inventory.supply import Supply

MOST_NODES = 8
REMEDY = "Add GPU nodes, or name products of the catalogue in spec.accelerators.products."


def no_accelerators(spec: ModelServeSpec, supply: Supply) -> str:
    """The message of NoAccelerators: every node that names a GPU with what keeps it out, the first few by name."""
    found = list(_left_out(spec, supply))
    found += [
        (name, f"names {product}, but its allocatable {GPU_RESOURCE} is 0: is the device plugin running?")
        for name, product in supply.idle
    ]
    remedy = " ".join([*_unknown_products(spec, supply), REMEDY])
    if not found:
        return f"No node names a GPU in its labels ({PRODUCT_LABEL}, or a cloud's own). {remedy}"
    shown = "; ".join(f"{name}: {why}" for name, why in sorted(found)[:MOST_NODES])
    more = f"; and {len(found) - MOST_NODES} more" if len(found) > MOST_NODES else ""
    return f"No node offers a GPU that the spec may use. {shown}{more}. {remedy}"


def _unknown_products(spec: ModelServeSpec, supply: Supply) -> Iterator[str]:
    """Products of the spec that no catalogue has: they cannot be planned for before a node is there."""
    known = supply.catalogue.accelerators
    for product in (spec.accelerators.products if spec.accelerators else None) or ():
        if product not in known:
            near = difflib.get_close_matches(product, known, n=1, cutoff=0.3)
            yield f"{product} is in no catalogue{f'; nearest is {near[0]}' if near else ''}."


def _left_out(spec: ModelServeSpec, supply: Supply) -> Iterator[tuple[str, str]]:
    """Each node of a pool, with why."""
    host = node_selector(spec).get(HOSTNAME_LABEL)
    for pool, names in supply.nodes_of.items():
        reasons = list(_reasons(pool, spec, supply))
        for name in names:
            elsewhere = host is not None and supply.hosts.get(host) != name
            other = [f"label {HOSTNAME_LABEL} is not {host}, which spec.accelerators.nodeSelector wants"] * elsewhere
            yield name, ", ".join([*reasons, *other]) or "nothing of it can be planned"


def _reasons(pool: Pool, spec: ModelServeSpec, supply: Supply) -> Iterator[str]:
    yield from pool.unmet(selector=node_selector(spec), tolerations=gpu_tolerations(spec))
    have = dict(pool.labels)
    offers = pool_offers(pool, supply.catalogue)
    product = named_gpu(have) or "an unnamed GPU"
    if not offers:
        yield f"{product} is in no catalogue and the node has no label {MEMORY_LABEL}"
    products = spec.accelerators.products if spec.accelerators else None
    if offers and products is not None and not {offer.accelerator.product for offer in offers} & set(products):
        yield f"{product} is not in spec.accelerators.products"
