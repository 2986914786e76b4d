"""From a spec, a model and the pools to a plan, and from a plan to the revision that would run it. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import yaml

from modelserve.api import ModelServeSpec, NodeSelectorTerm, PlanStatus
from modelserve.model_facts import ModelFacts
from modelserve.planning import ENGINE_VERSION, AcceleratorOffer, engine_args_for, plan
from modelserve_operator import labels
from modelserve_operator.catalogue import Catalogue
from modelserve_operator.declared_pools import declared_offers, named_offers
from modelserve_operator.inventory import Pool, pool_offers
from modelserve_operator.manifests.worker_template import GPU_TOLERATION, worker_template
from modelserve_operator.revision import Revision, spec_hash
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource
from modelserve_operator.supply import Supply


def plan_for(spec: ModelServeSpec, facts: ModelFacts, supply: Supply) -> PlanStatus:
    """Plan on the pools that exist and those that are declared; where none fits, also on products that the spec names.

    A declared pool counts whether or not it has nodes now, so that a plan does not change with them. Terms that were
    measured before take the place of predicted ones. Raises InvalidInput for settings that contradict the model.

    A plan takes milliseconds, and many ModelServes are alike: it is kept with the supply that it was made on.
    """
    key = (spec_hash(spec), hash(facts))
    if key not in supply.plans:
        supply.plans[key] = _plan(spec, facts, supply)
    return supply.plans[key]


def _plan(spec: ModelServeSpec, facts: ModelFacts, supply: Supply) -> PlanStatus:
    tolerations = gpu_tolerations(spec)
    there = [
        *existing_offers(spec, supply.pools, supply.catalogue, tolerations=tolerations),
        *declared_offers(spec, supply.catalogue, supply.node_pools, tolerations=tolerations),
    ]
    terms = supply.learned.terms_for(facts, engine_version=ENGINE_VERSION)
    result = plan(spec, facts.architecture, there, learned=terms, weight_format=facts.format)
    named = [] if result.fits else named_offers(spec, supply.catalogue, there)
    if not named:
        return result
    return plan(spec, facts.architecture, [*there, *named], learned=terms, weight_format=facts.format)


def gpu_tolerations(spec: ModelServeSpec) -> list[dict[str, Any]]:
    """Tolerations of pods that ask for GPUs."""
    return [GPU_TOLERATION, *(toleration.to_json() for toleration in spec.pod.tolerations)]


def existing_offers(
    spec: ModelServeSpec, pools: tuple[Pool, ...], catalogue: Catalogue, *, tolerations: Iterable[Mapping[str, Any]]
) -> list[AcceleratorOffer]:
    """One offer per accelerator, resource and number per node, of the pools where the pods may run."""
    node_selector = spec.accelerators.node_selector if spec.accelerators else {}
    allowed = tuple(tolerations)
    grouped: dict[AcceleratorOffer, list[tuple[NodeSelectorTerm, ...]]] = {}
    for pool in pools:
        if pool.accepts(node_selector=node_selector, tolerations=allowed):
            for offer in pool_offers(pool, catalogue):
                grouped.setdefault(replace(offer, node_selector_terms=()), []).append(offer.node_selector_terms)
    return [
        replace(offer, node_selector_terms=tuple(dict.fromkeys(term for each in members for term in each)))
        for offer, members in grouped.items()
    ]


def build_revision(
    spec: ModelServeSpec,
    sized: PlanStatus,
    *,
    name: str,
    source: ModelSource,
    facts: ModelFacts,
    settings: Settings,
) -> Revision:
    """The revision that would run the plan. Its hash names the ConfigMap and the Deployment; it covers the plan, where
    its pods run and what the spec adds to them.
    """
    image = spec.image or settings.worker_image
    terms = [term.to_json() for term in sized.node_selector_terms or ()]
    pull_secrets = settings.image_pull_secrets
    plan_hash = labels.short_hash([sized.hash, spec_hash(spec), terms, image, *pull_secrets])
    arguments = engine_args_for(sized, spec, model_directory=source.directory)
    return Revision(
        hash=plan_hash,
        spec_hash=spec_hash(spec),
        plan=sized,
        engine_yaml=_as_yaml(arguments.model_dump_json(by_alias=True, exclude_none=True)),
        template=worker_template(
            spec,
            sized,
            name=name,
            plan_hash=plan_hash,
            source=source,
            weight_bytes=facts.weight_bytes,
            image=image,
            pull_policy=settings.image_pull_policy,
            pull_secrets=pull_secrets,
        ),
        weight_bytes=facts.weight_bytes,
    )


@lru_cache(maxsize=1024)  # many ModelServes are alike
def _as_yaml(document: str) -> str:
    return yaml.safe_dump(json.loads(document), sort_keys=True)
