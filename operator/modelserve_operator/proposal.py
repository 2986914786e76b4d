"""From a spec, a model and the pools to a plan, and from a plan to the revision that would run it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import yaml

from modelserve.api import ModelServeSpec, NodeSelectorTerm, PlanStatus
from modelserve.hardware import CATALOGUE, CPU_PRODUCT, accelerator_from_labels
from modelserve.model_facts import ModelFacts
from modelserve.planning import ENGINE_VERSION, AcceleratorOffer, engine_args_for, plan
from modelserve.planning.wishes import MAX_GPUS_PER_REPLICA
from modelserve_operator import labels
from modelserve_operator.inventory import Pool, node_selector_terms
from modelserve_operator.learned_memory import LearnedMemory
from modelserve_operator.manifests.worker_template import GPU_TOLERATION, worker_template
from modelserve_operator.revision import Revision, spec_hash
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource


def plan_for(spec: ModelServeSpec, facts: ModelFacts, pools: Iterable[Pool], *, learned: LearnedMemory) -> PlanStatus:
    """Plan on the pools that exist; where none fits, also on products that the spec names and no node has yet.

    Terms that were measured before take the place of predicted ones. A product that some node has is taken as its nodes
    are: bigger nodes of it are not made up. Raises InvalidInput for settings that contradict the model.
    """
    existing = offers(spec, tuple(pools))
    terms = learned.terms_for(facts, engine_version=ENGINE_VERSION)
    result = plan(spec, facts.architecture, existing, learned=terms, weight_format=facts.format)
    if result.fits:
        return result
    declared = declared_offers(spec, existing)
    if not declared:
        return result
    every = [*existing, *declared]
    return plan(spec, facts.architecture, every, learned=terms, weight_format=facts.format)


def offers(spec: ModelServeSpec, pools: tuple[Pool, ...]) -> list[AcceleratorOffer]:
    """One offer per accelerator and number of GPUs per node, of the pools where the pods may run."""
    node_selector = spec.accelerators.node_selector if spec.accelerators else {}
    tolerations = [GPU_TOLERATION, *(toleration.to_json() for toleration in spec.pod.tolerations)]
    grouped: dict[AcceleratorOffer, list[Pool]] = {}
    for pool in pools:
        accelerator = accelerator_from_labels(
            pool.product,
            memory_mib=pool.memory_mib or None,
            compute_capability=pool.compute_capability if pool.compute_capability[0] else None,
        )
        if accelerator is not None and pool.accepts(node_selector=node_selector, tolerations=tolerations):
            grouped.setdefault(AcceleratorOffer(accelerator, pool.gpus_per_node), []).append(pool)
    return [
        replace(offer, node_selector_terms=_terms(node_selector_terms(members, all_pools=pools)))
        for offer, members in grouped.items()
    ]


def declared_offers(spec: ModelServeSpec, existing: Iterable[AcceleratorOffer]) -> list[AcceleratorOffer]:
    """Products of the catalogue that the spec names and no node has: pools that may grow from nothing."""
    if spec.accelerators is None or spec.accelerators.products is None:
        return []
    present = {offer.accelerator.product for offer in existing}
    count = spec.accelerators.max_per_replica or MAX_GPUS_PER_REPLICA
    return [
        AcceleratorOffer(CATALOGUE[product], count)
        for product in spec.accelerators.products
        if product in CATALOGUE and product not in present and product != CPU_PRODUCT
    ]


def _terms(documents: list[dict[str, object]]) -> tuple[NodeSelectorTerm, ...]:
    return tuple(NodeSelectorTerm.model_validate(document) for document in documents)


def build_revision(
    spec: ModelServeSpec,
    sized: PlanStatus,
    *,
    name: str,
    source: ModelSource,
    facts: ModelFacts,
    settings: Settings,
) -> Revision:
    """The revision that would run the plan. Its hash covers the plan, where its pods run and what the spec
    adds to them.

    The hash of the plan in it is the revision's: it names the ConfigMap, the Deployment and what approve-plan approves.
    """
    image = spec.image or settings.worker_image
    terms = [term.to_json() for term in sized.node_selector_terms or ()]
    plan_hash = labels.short_hash([sized.hash, spec_hash(spec), terms, image])
    named = sized.model_copy(update={"hash": plan_hash})
    arguments = engine_args_for(named, spec, model_directory=source.directory)
    return Revision(
        hash=plan_hash,
        spec_hash=spec_hash(spec),
        plan=named,
        engine_yaml=yaml.safe_dump(arguments.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=True),
        template=worker_template(
            spec,
            named,
            name=name,
            plan_hash=plan_hash,
            source=source,
            weight_bytes=facts.weight_bytes,
            image=image,
            pull_policy=settings.image_pull_policy,
        ),
        weight_bytes=facts.weight_bytes,
    )
