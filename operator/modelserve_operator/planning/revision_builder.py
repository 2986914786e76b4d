"""From a spec, a model and the pools to a plan, and from a plan to the revision that would run it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from modelserve import __version__
from modelserve.api import ModelServeSpec, NodeSelectorTerm, PlanStatus
from modelserve.api.spec import WorkerPolicy
from modelserve.api.status import SpeedFactors
from modelserve.engine_args import in_dialect
from modelserve.hardware import IMAGE_ARCHITECTURES
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.planning import ENGINE_VERSION, AcceleratorOffer, engine_args_for, plan, plan_hash
from modelserve.planning.drafts import named_drafters
from modelserve.planning.learned import Learned, pair_of
from modelserve.planning.pools.declared_pools import declared_offers, named_offers
from modelserve.planning.pools.eligibility import gpu_tolerations, node_selector
from modelserve.planning.wishes import NO_FACTS
from modelserve.published import published_assistant
from modelserve.releases import release_of_image
from modelserve.sizing.pages import KVCacheDtype
from modelserve_operator import labels
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.inventory.measurements import weights_digest
from modelserve_operator.inventory.pools import Pool, pool_offers
from modelserve_operator.inventory.supply import Offered, Supply
from modelserve_operator.manifests.worker_template import SHUTDOWN_DELAY_SECONDS, with_worker, worker_template
from modelserve_operator.revisions.revision import Provenance, Revision, Worker
from modelserve_operator.revisions.spec_inputs import canonical_spec, read_by_planner, spec_inputs
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource, drafter_source, model_source

MOST_ORIGINS = 20  # hashes of a revision's past that approvals may still name


def plan_for(
    spec: ModelServeSpec,
    facts: ModelFacts,
    supply: Supply,
    *,
    committed: Revision | None = None,
    assistants: Mapping[str, AssistantFacts] = NO_FACTS,
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
) -> PlanStatus:
    """Plan on the pools that exist and those that are declared; where none fits, also on products that the spec names.

    A declared pool counts whether or not it has nodes now, so that a plan does not change with them. Terms that were
    measured before take the place of predicted ones. Raises InvalidInput for settings that contradict the model.

    Beside a `committed` revision candidates are ranked with the speeds that its plan knew, so that no plan is proposed
    for the speed alone, or the share of drafts that were right, that its own workers, or others, have measured since.
    What an 8-bit cache costs the weights counts as it is known now; where nobody knows, one that the committed plan has
    stays, and no other is taken.

    A plan takes milliseconds, and many ModelServes differ in name only: it is kept with the offers it was made from.
    """
    offered = _offered(spec, supply)
    weights = weights_digest(model_source(spec).hash, facts)
    known = supply.learned.learned_for(facts, weights=weights, engine_version=ENGINE_VERSION)
    speed, acceptance = _known_then(spec, committed.plan) if committed is not None else _known_now(known)
    # Names tell which pairs belong together, and what is known of them.
    drafters = tuple(sorted(assistants.items(), key=lambda each: each[0]))
    paired = (spec.model.uri, drafters, tuple(acceptance.items())) if spec.drafter is not None else None
    before = _eight_bits_on(spec, committed)
    key = (
        read_by_planner(spec), facts, speed, supply.learned.view, paired, image_architectures,
        (known.cache_quality, before),
    )  # fmt: skip
    sized = offered.plans.get(key)
    if sized is None:
        counted = replace(known, speed=speed, acceptance=acceptance, eight_bits_on=before)
        sized = _plan(spec, facts, supply, offered.offers, counted, assistants, image_architectures)
        offered.keep(key, sized)
    return (
        sized.model_copy(update={"hash": plan_hash(sized, spec, engine_version=ENGINE_VERSION)})
        if sized.fits
        else sized
    )


def offers_for(spec: ModelServeSpec, supply: Supply) -> tuple[AcceleratorOffer, ...]:
    """What existing and declared pools offer to the pods of a spec."""
    return _offered(spec, supply).offers


def _known_now(learned: Learned) -> tuple[tuple[SpeedFactors, ...], Mapping[str, float]]:
    return learned.speed, learned.acceptance


def _known_then(spec: ModelServeSpec, made: PlanStatus) -> tuple[tuple[SpeedFactors, ...], Mapping[str, float]]:
    """What had been measured of speed, and of the spec's drafts, when a plan of this spec was made."""
    told = dict(made.draft_acceptances or {})
    if made.draft_acceptance is not None:
        told |= dict.fromkeys((each.uri for each in named_drafters(spec)), made.draft_acceptance)
    return made.speed_factors or (), {pair_of(spec.model.uri, uri): float(chance) for uri, chance in told.items()}


def _eight_bits_on(spec: ModelServeSpec, committed: Revision | None) -> str:
    """The accelerator of a committed plan with an 8-bit cache that the spec does not name: releases before took one
    unmeasured, and workers that have one measure none for the release after."""
    if _names_a_dtype(spec) or committed is None or committed.plan.kv_cache is None:
        return ""
    return (committed.plan.accelerator or "") if committed.plan.kv_cache.dtype is KVCacheDtype.INT8 else ""


def _names_a_dtype(spec: ModelServeSpec) -> bool:
    return spec.kv_cache is not None and spec.kv_cache.dtype is not None


def _plan(
    spec: ModelServeSpec,
    facts: ModelFacts,
    supply: Supply,
    there: tuple[AcceleratorOffer, ...],
    learned: Learned,
    assistants: Mapping[str, AssistantFacts],
    image_architectures: tuple[str, ...],
) -> PlanStatus:
    planned = partial(
        plan, spec, facts.architecture, learned=learned, weight_format=facts.format, assistants=assistants,
        image_architectures=image_architectures, images=facts.images, audio=facts.audio,
    )  # fmt: skip
    result = planned(there)
    named = [] if result.fits else named_offers(spec, supply.catalogue.accelerators, there)
    if not named:
        return result
    return planned([*there, *named])


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


@dataclass(frozen=True)
class RevisionBuilder:
    """Makes revisions of one spec; everything in them but the plan and the worker is the same."""

    spec: ModelServeSpec
    name: str
    source: ModelSource
    facts: ModelFacts
    settings: Settings
    generation: int = 0
    approved_by: str = ""
    assistants: Mapping[str, AssistantFacts] = field(default_factory=dict)  # of drafters that no release ships

    def proposed(self, plan: PlanStatus) -> Revision:
        """The revision that would run a plan of today, on the worker of today."""
        return self._built(plan, worker_of_today(self.spec, self.settings), planner=ENGINE_VERSION)

    def with_plan_of(self, committed: Revision) -> Revision:
        """The plan of a committed revision, whose inputs are the same, in pods as the spec has them now.

        Neither nodes nor calibration nor a newer worker come in by an edit that is about pods.
        """
        same_image = self.follows_operator(committed) and self.policy == "Proposed"
        worker = committed.worker if same_image else worker_of_today(self.spec, self.settings)
        planner = committed.provenance.planner if same_image else ENGINE_VERSION
        return self._built(self._renamed(committed.plan, planner), worker, planner=planner)

    def moved(self, committed: Revision) -> Revision:
        """The revision on the worker of today: the image and the dialect of the settings change, and nothing else."""
        worker = worker_of_today(self.spec, self.settings)
        plan = self._renamed(committed.plan, ENGINE_VERSION)
        revision_hash = labels.short_hash(["moved", committed.hash, plan.hash, worker.image])
        origin = committed.provenance.moved_from
        return replace(
            committed,
            hash=revision_hash,
            plan=plan,
            engine=in_dialect(committed.engine, worker.release),
            template=with_worker(
                committed.template, worker=worker, name=self.name, before=committed.hash, after=revision_hash
            ),
            worker=worker,
            provenance=replace(
                self._provenance(ENGINE_VERSION),
                moved_from=(committed.hash, str(committed.plan.hash), *origin)[:MOST_ORIGINS],
            ),
            number=0,
        )

    def follows_operator(self, committed: Revision) -> bool:
        """Whether neither the revision nor the spec names an image of its own."""
        return self.spec.image is None and "image" not in committed.spec

    @property
    def policy(self) -> WorkerPolicy:
        """What happens when the operator's worker image is another one."""
        return self.spec.rollout.worker_policy or self.settings.worker_policy

    def _renamed(self, plan: PlanStatus, planner: str) -> PlanStatus:
        """The plan under the hash that it has for this spec."""
        return plan.model_copy(update={"hash": plan_hash(plan, self.spec, engine_version=planner)})

    def _provenance(self, planner: str) -> Provenance:
        return Provenance(
            renderer=__version__,
            planner=planner,
            build=self.settings.build_id,
            generation=self.generation,
            approved_by=self.approved_by,
            policy=self.policy,
        )

    def _built(self, plan: PlanStatus, worker: Worker, *, planner: str) -> Revision:
        """Its hash names it and the Deployment; it covers the plan, the worker, placement and what the spec adds."""
        spec, settings = self.spec, self.settings
        inputs = spec_inputs(spec)
        terms = [term.to_json() for term in plan.node_selector_terms or ()]
        pull_secrets = settings.image_pull_secrets
        identity = [plan.hash, inputs.plan, inputs.pod, terms, worker.image, *pull_secrets]
        revision_hash = labels.short_hash(identity)
        drafters = self._drafters(plan)
        moving = tuple(each.hash if each.moves else "" for each in drafters)
        arguments = engine_args_for(
            plan,
            spec,
            model_directory=self.source.directory,
            drafter_directories=tuple(each.directory for each in drafters),
        )
        drafter_bytes = self._drafter_bytes(plan)
        arguments = arguments.model_copy(
            update={
                **_sized_for(plan),
                "shutdown_delay_seconds": SHUTDOWN_DELAY_SECONDS,
                "measure_cache_quality": would_gain(spec, plan),
            },
        )
        return Revision(
            hash=revision_hash,
            plan=plan,
            engine=arguments.dialect(worker.release),
            template=worker_template(
                spec,
                plan,
                name=self.name,
                plan_hash=revision_hash,
                source=self.source,
                weight_bytes=self.facts.weight_bytes,
                worker=worker,
                pull_policy=settings.image_pull_policy,
                pull_secrets=pull_secrets,
                user_id=settings.pod_user_id,
                drafters=drafters,
                drafter_bytes=drafter_bytes,
            ),
            weight_bytes=self.facts.weight_bytes + sum(drafter_bytes),
            worker=worker,
            inputs=inputs,
            spec=canonical_spec(spec),
            source=self.source.hash,
            drafter_sources=moving if any(moving) else (),
            identity=self.facts.identity or "",
            provenance=self._provenance(planner),
        )

    def _drafters(self, plan: PlanStatus) -> tuple[ModelSource, ...]:
        """The drafters of a plan, as its pods have them."""
        found: tuple[ModelSource, ...] = ()
        for uri, revision in plan.drafter.named if plan.drafter is not None else ():
            found += (drafter_source(self.spec, uri, revision).beside(self.source, *found),)
        return found

    def _drafter_bytes(self, plan: PlanStatus) -> tuple[int, ...]:
        named = plan.drafter.named if plan.drafter is not None else ()
        facts = (published_assistant(uri) or self.assistants.get(uri) for uri, _ in named)
        return tuple(each.weight_bytes if each is not None else 0 for each in facts)


def worker_of_today(spec: ModelServeSpec, settings: Settings) -> Worker:
    """The image of the spec, else of the settings. An image whose tag names no release is taken for this one's."""
    image = spec.image or settings.worker_image
    return Worker(image, release_of_image(image) or __version__)


def would_gain(spec: ModelServeSpec, plan: PlanStatus) -> bool:
    """Whether a worker is to measure what 8 bits cost: nobody named a format, and the plan has less context than asked.
    It is no part of a plan's hash, so that no plan that runs changes by it."""
    asked = spec.context.max_model_len if spec.context is not None else None
    if _names_a_dtype(spec) or asked is None or plan.kv_cache is None or plan.kv_cache.dtype is KVCacheDtype.INT8:
        return False
    return (plan.max_model_len or 0) < asked


def _sized_for(sized: PlanStatus) -> dict[str, Any]:
    """The GPU that the worker compares with what it finds; nothing on the CPU, whose memory the container limits.

    The terms of a plan add up to its budget, the utilised share of the memory.
    """
    if not sized.gpus_per_replica or sized.per_gpu is None or sized.engine is None:
        return {}
    budget = sum(sized.per_gpu.to_json().values())
    memory = int(Decimal(budget) / Decimal(sized.engine.gpu_memory_utilization))
    return {"accelerator": sized.accelerator, "accelerator_memory_bytes": memory}
