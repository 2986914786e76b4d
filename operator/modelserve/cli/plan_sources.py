"""Where `modelserve plan` looks: documents of its files, and accelerators that flags, nodes and catalogues name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modelserve.api import ModelServeSpec
from modelserve.bounded_yaml import load_documents
from modelserve.catalogue import declared_pools, user_catalogue
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, Accelerator
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.declared_pools import declared_offers, named_offers
from modelserve.planning.pools.eligibility import gpu_tolerations, lasting_taints, node_selector, unmet
from modelserve.planning.pools.node_labels import is_mig_slice, named_gpu, whole
from modelserve.planning.pools.node_pools import offers_from_node_pool
from modelserve.planning.pools.offers import AcceleratorOffer, offers_from_nodes

MOST_NEAREST = 4
GPUS_PER_NODE = 8  # of the catalogue's products, when no accelerator is given
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Inventory:
    """Accelerators that were named, and a cluster whose nodes let some pods in and others not."""

    catalogue: Mapping[str, Accelerator]
    named: tuple[AcceleratorOffer, ...] = ()  # by a flag, or every known product
    declared: tuple[AcceleratorOffer, ...] = ()  # by the catalogue file
    nodes: tuple[Body, ...] = ()
    node_pools: tuple[Body, ...] = ()
    of_cluster: bool = False  # whether a node file was given

    def pools(self) -> tuple[AcceleratorOffer, ...]:
        """Everything that is there, whoever may use it."""
        grown = (offer for body in self.node_pools for offer in offers_from_node_pool(body, self.catalogue))
        return (*self.named, *self.declared, *offers_from_nodes(self.nodes, self.catalogue), *grown)

    def offers(self, spec: ModelServeSpec) -> tuple[AcceleratorOffer, ...]:
        """What is there for the pods of a spec, as the operator sees it: their tolerations and node selector count."""
        admitting = [node for node in self.nodes if not any(_unmet(node, spec))]
        grown = declared_offers(spec, declared=self.declared, node_pools=self.node_pools, catalogue=self.catalogue)
        return (*self.named, *offers_from_nodes(admitting, self.catalogue), *grown)

    def on_trust(self, spec: ModelServeSpec, offers: Sequence[AcceleratorOffer]) -> list[AcceleratorOffer]:
        """In a cluster, products that the spec names and nothing offers: the operator plans for them, too."""
        return named_offers(spec, self.catalogue, offers) if self.of_cluster else []

    def left_out(self, spec: ModelServeSpec) -> list[str]:
        """Nodes with a GPU that do not let the pods of a spec in, and why."""
        found = []
        for node in self.nodes:
            metadata = mapping(node.get("metadata"))
            reasons = ", ".join(_unmet(node, spec))
            if reasons and named_gpu(mapping(metadata.get("labels"))):
                found.append(f"node {metadata.get('name', 'without a name')} is left out: {reasons}")
        return found


def _unmet(node: Body, spec: ModelServeSpec) -> Iterator[str]:
    labels = mapping(mapping(node.get("metadata")).get("labels"))
    taints = lasting_taints(node.get("spec"))
    return unmet(labels, taints, selector=node_selector(spec), tolerations=gpu_tolerations(spec))


def inventory(accelerators: Sequence[str], *, node_file: str | None, catalogue_file: str | None) -> Inventory:
    """What the flags name: accelerators as PRODUCT[:COUNT], a file of nodes, a file of further products; without any,
    every product known.

    Raises InvalidInput for anything wrong in them.
    """
    catalogue, declared = _with_catalogue(None if catalogue_file is None else _catalogue_data(catalogue_file))
    named = tuple(_offer(text, catalogue) for text in accelerators)
    if node_file is not None:
        bodies = [body for body in documents(node_file) if isinstance(body, dict)]
        nodes = tuple(body for body in bodies if body.get("kind", "Node") == "Node")
        node_pools = tuple(body for body in bodies if body.get("kind") == "NodePool")
        if not nodes and not node_pools:
            raise InvalidInput(f"{shown_name(node_file)} holds no Node and no NodePool")
        return Inventory(catalogue, named, declared, nodes, node_pools, of_cluster=True)
    if not named and not declared:
        named = tuple(AcceleratorOffer(record, GPUS_PER_NODE) for record in catalogue.values() if not record.is_cpu)
    return Inventory(catalogue, named, declared)


def documents(file: str) -> Iterator[Any]:
    """Documents of a YAML file, the items of a List each on its own; empty documents are skipped."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        documents = list(load_documents(text))
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{shown_name(file)}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{shown_name(file)} is not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else ()
        elif document is not None:
            yield document


def inventory_of_cluster(
    nodes: Sequence[Body], node_pools: Sequence[Body], catalogue_data: Mapping[str, Any] | None
) -> Inventory:
    """What a cluster has. `catalogue_data`: of the ConfigMap with further products. Raises InvalidInput for these."""
    catalogue, declared = _with_catalogue(catalogue_data)
    return Inventory(catalogue, (), declared, tuple(nodes), tuple(node_pools), of_cluster=True)


def _with_catalogue(
    data: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Accelerator], tuple[AcceleratorOffer, ...]]:
    """The shipped products with further ones, and the pools that these declare."""
    if data is None:
        return CATALOGUE, ()
    return {**CATALOGUE, **user_catalogue(data)}, declared_pools(data)


def _catalogue_data(file: str) -> Mapping[str, Any]:
    """Of a file with a ConfigMap, or with its data alone."""
    found = [document for document in documents(file) if isinstance(document, dict)]
    if len(found) != 1:
        raise InvalidInput(f"{shown_name(file)} must hold one mapping of products or one ConfigMap, not {len(found)}")
    data = found[0].get("data") if "kind" in found[0] else found[0]
    if not isinstance(data, dict):
        raise InvalidInput(f"{shown_name(file)} has no data with one entry per product")
    return data


def _offer(text: str, catalogue: Mapping[str, Accelerator]) -> AcceleratorOffer:
    product, separator, number = text.partition(":")
    if is_mig_slice(product):
        raise InvalidInput(
            f"--accelerator {product[:64]!r} is a MIG slice, which is planned from the nodes that have it: use --nodes "
            "FILE, with `kubectl get nodes -o yaml`"
        )
    if product not in catalogue:
        raise InvalidInput(
            f"--accelerator {product[:64]!r} is not known; nearest are {', '.join(_nearest(product, catalogue))}; "
            "--catalogue FILE adds products, and --nodes FILE reads those of a cluster"
        )
    if separator and not 1 <= whole(number) <= 64:
        raise InvalidInput(f"--accelerator {text[:64]!r}: the count behind ':' must be 1 to 64 GPUs per node")
    accelerator = catalogue[product]
    return AcceleratorOffer(accelerator, 0 if accelerator.is_cpu else whole(number) or 1)


def _nearest(product: str, catalogue: Mapping[str, Accelerator]) -> list[str]:
    """Products with the text in their name, as a word before as a part of one, and those that NVLink joins before
    boards; else those spelt alike."""
    text = product.lower()
    has = [record for name, record in catalogue.items() if text in name.lower() and not record.is_cpu]
    if text and has:
        ordered = sorted(has, key=lambda each: (text not in each.product.lower().split("-"), -each.link, each.product))
        return [record.product for record in ordered][:MOST_NEAREST]
    near = difflib.get_close_matches(product, catalogue, n=MOST_NEAREST, cutoff=0.3)
    return near or list(catalogue)


def shown_name(file: str) -> str:
    return "standard input" if file == "-" else file
