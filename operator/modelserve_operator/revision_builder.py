"""From a spec, a model and the pools to a plan, and from a plan to the revision that would run it. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

import yaml

from modelserve.api import ModelServeSpec, NodeSelectorTerm, PlanStatus, PodOverrides
from modelserve.model_facts import ModelFacts
from modelserve.planning import ENGINE_VERSION, AcceleratorOffer, engine_args_for, plan, plan_hash
from modelserve.planning.admission import gpu_tolerations, node_selector
from modelserve.planning.declared_pools import declared_offers, named_offers
from modelserve.planning.learned import Learned
from modelserve_operator import labels
from modelserve_operator.catalogue import Catalogue
from modelserve_operator.inventory import Pool, pool_offers
from modelserve_operator.manifests.worker_template import SHUTDOWN_DELAY_SECONDS, worker_template
from modelserve_operator.revision import Revision, spec_hash
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource
from modelserve_operator.supply import Offered, Supply


def plan_for(
    spec: ModelServeSpec, facts: ModelFacts, supply: Supply, *, committed: Revision | None = None
) -> PlanStatus:
    """Plan on the pools that exist and those that are declared; where none fits, also on products that the spec names.

    A declared pool counts whether or not it has nodes now, so that a plan does not change with them. Terms that were
    measured before take the place of predicted ones. Raises InvalidInput for settings that contradict the model.

    Beside a `committed` revision candidates are ranked with the speeds that its plan knew, so that no plan is proposed
    for the speed alone that its own workers, or others, have measured since.

    A plan takes milliseconds, and many ModelServes differ in name only: it is kept with the offers it was made from.
    """
    offered = _offered(spec, supply)
    learned = partial(supply.learned.learned_for, facts, engine_version=ENGINE_VERSION)
    speed = learned().speed if committed is None else committed.plan.speed_factors or ()
    key = (_read_by_planner(spec), facts, speed, supply.learned.view)
    sized = offered.plans.get(key)
    if sized is None:
        sized = _plan(spec, facts, supply, offered.offers, replace(learned(), speed=speed))
        offered.keep(key, sized)
    return sized.model_copy(update={"hash": plan_hash(sized, spec)}) if sized.fits else sized


# What a plan does not depend on, but for its hash. A field that is added to the spec counts until it is named here.
_NOT_READ: dict[str, Any] = {
    **dict.fromkeys(("model", "replicas", "image", "storage", "plan", "rollout"), True),
    "pod": set(PodOverrides.model_fields) - {"resources", "tolerations"},
}


def _read_by_planner(spec: ModelServeSpec) -> str:
    return spec.model_dump_json(exclude=_NOT_READ, exclude_none=True)


def _plan(
    spec: ModelServeSpec, facts: ModelFacts, supply: Supply, there: tuple[AcceleratorOffer, ...], learned: Learned
) -> PlanStatus:
    result = plan(spec, facts.architecture, there, learned=learned, weight_format=facts.format)
    named = [] if result.fits else named_offers(spec, supply.catalogue.accelerators, there)
    if not named:
        return result
    return plan(spec, facts.architecture, [*there, *named], learned=learned, weight_format=facts.format)


def _offered(spec: ModelServeSpec, supply: Supply) -> Offered:
    """What the pools offer to pods like these: there may be thousands of pools, and few kinds of pods."""
    selector = node_selector(spec)
    key = labels.short_hash([selector, gpu_tolerations(spec)])
    found = supply.offered.get(key)
    if found is None:
        there = (
            *existing_offers(spec, supply.pools_for(selector), supply.catalogue),
            *declared_offers(
                spec,
                declared=supply.catalogue.declared,
                node_pools=supply.node_pools,
                catalogue=supply.catalogue.accelerators,
            ),
        )
        before = supply.offered_before.get(key)
        found = before if before is not None and before.offers == there else Offered(there)
        supply.keep(key, found)
    return found


def existing_offers(spec: ModelServeSpec, pools: Iterable[Pool], catalogue: Catalogue) -> list[AcceleratorOffer]:
    """One offer per accelerator, resource and number per node, of the pools where the pods may run.

    The order of offers and terms is their own, whatever else the labels of the nodes say.
    """
    selector, tolerations = node_selector(spec), gpu_tolerations(spec)
    grouped: dict[AcceleratorOffer, dict[NodeSelectorTerm, None]] = {}
    for pool in pools:
        if not any(pool.unmet(selector=selector, tolerations=tolerations)):
            for bare, terms in _bare_offers(pool, catalogue):
                grouped.setdefault(bare, {}).update(dict.fromkeys(terms))
    found = [replace(offer, node_selector_terms=tuple(sorted(terms, key=repr))) for offer, terms in grouped.items()]
    return sorted(found, key=repr)


@lru_cache(maxsize=8192)  # every change of a node asks for every pool
def _bare_offers(pool: Pool, catalogue: Catalogue) -> tuple[tuple[AcceleratorOffer, tuple[NodeSelectorTerm, ...]], ...]:
    """The offers of a pool apart from the terms that name it."""
    offers = pool_offers(pool, catalogue)
    return tuple((replace(offer, node_selector_terms=()), offer.node_selector_terms) for offer in offers)


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
    revision_hash = labels.short_hash([sized.hash, spec_hash(spec), terms, image, *pull_secrets])
    arguments = engine_args_for(sized, spec, model_directory=source.directory)
    arguments = arguments.model_copy(
        update={**_sized_for(sized), "shutdown_delay_seconds": SHUTDOWN_DELAY_SECONDS},
    )
    return Revision(
        hash=revision_hash,
        spec_hash=spec_hash(spec),
        plan=sized,
        engine_yaml=_as_yaml(arguments.model_dump_json(by_alias=True, exclude_none=True)),
        template=worker_template(
            spec,
            sized,
            name=name,
            plan_hash=revision_hash,
            source=source,
            weight_bytes=facts.weight_bytes,
            image=image,
            pull_policy=settings.image_pull_policy,
            pull_secrets=pull_secrets,
            user_id=settings.pod_user_id,
        ),
        weight_bytes=facts.weight_bytes,
    )


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the C form, where PyYAML was built with it, is much faster


def _sized_for(sized: PlanStatus) -> dict[str, Any]:
    """The GPU that the worker compares with what it finds; nothing on the CPU, whose memory the container limits.

    The terms of a plan add up to its budget, the utilised share of the memory.
    """
    if not sized.gpus_per_replica or sized.per_gpu is None or sized.engine is None:
        return {}
    budget = sum(sized.per_gpu.to_json().values())
    memory = int(Decimal(budget) / Decimal(sized.engine.gpu_memory_utilization))
    return {"accelerator": sized.accelerator, "accelerator_memory_bytes": memory}


@lru_cache(maxsize=1024)  # many ModelServes are alike
def _as_yaml(document: str) -> str:
    return str(yaml.dump(json.loads(document), Dumper=_DUMPER, sort_keys=True))
