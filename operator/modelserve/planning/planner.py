"""From a spec, a model's geometry and a cluster's accelerators to an explained plan. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import MAX_CANDIDATES, Candidate, PlanStatus, Verdict
from modelserve.hardware import CPU_PRODUCT, GPU_RESOURCE, IMAGE_ARCHITECTURES, Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.audio import AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import AssistantFacts
from modelserve.model.weight_format import WeightFormat
from modelserve.planning import report
from modelserve.planning.engine_settings import ENGINE_VERSION, plan_hash
from modelserve.planning.evaluation import Evaluation, Fit, Refusal
from modelserve.planning.hosting import hosted, unsaid, with_room
from modelserve.planning.learned import NOTHING_LEARNED, Learned
from modelserve.planning.pools.eligibility import node_selector
from modelserve.planning.pools.node_labels import is_mig_slice
from modelserve.planning.pools.offers import CPU_OFFER, AcceleratorOffer, on_nodes
from modelserve.planning.ranking import RankKey, rank_key
from modelserve.planning.remedies import remedies, remedy_text
from modelserve.planning.speed.expected_speed import Speed, speed
from modelserve.planning.speed.paying_drafts import evaluate_drafted
from modelserve.planning.wishes import GPU_COUNTS, NO_FACTS, Wishes, wishes


@dataclass(frozen=True)
class Considered:
    """A candidate after evaluation; `rank` and what is expected of its speed are None when it was refused."""

    evaluation: Evaluation
    rank: RankKey | None = None
    expected: Speed | None = None


def plan(
    spec: ModelServeSpec,
    architecture: ModelArchitecture,
    accelerators: Sequence[AcceleratorOffer],
    *,
    engine_version: str = ENGINE_VERSION,
    learned: Learned = NOTHING_LEARNED,
    weight_format: WeightFormat | None = None,
    assistants: Mapping[str, AssistantFacts] = NO_FACTS,
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
) -> PlanStatus:
    """The best plan, with the best candidate of each product (16 at most). `plan.fits` is False when none fits.

    `weight_format` is the checkpoint's; left out, the architecture's dtype. `assistants`: facts of the spec's own
    drafters, by address, where no release ships them. `image_architectures`: CPUs that the worker's image is built for.
    `images` and `audio`: how the model sees and hears, where it does.
    Raises InvalidInput where a drafter is that of another model, or the model does not see or hear what it is asked to.
    """
    wished = _wishes(
        spec, architecture, learned=learned, weight_format=weight_format, assistants=assistants,
        image_architectures=image_architectures, images=images, audio=audio,
    )  # fmt: skip
    considered = consider(
        spec, architecture, accelerators, learned=learned, weight_format=weight_format, assistants=assistants,
        image_architectures=image_architectures, images=images, audio=audio,
    )  # fmt: skip
    best, expected = (considered[0].evaluation, considered[0].expected) if considered else (None, None)
    shown = _best_per_product(considered)[:MAX_CANDIDATES]
    candidates = candidate_list(
        shown, spec, architecture, learned=learned, weight_format=weight_format, assistants=assistants,
        image_architectures=image_architectures, images=images, audio=audio,
    )  # fmt: skip
    if not isinstance(best, Fit) or expected is None:
        return PlanStatus(candidates=candidates, message=report.no_plan(candidates, spec))
    offers = [
        offer
        for offer in _allowed(spec, accelerators)
        if _kind(offer.accelerator) == _kind(best.accelerator) and not offer.refused
    ]
    offers = with_room(offers, spec, wished, gpus=best.gpus)
    resource_name = _resource_name(best, offers)
    if resource_name is not None:  # a pod that asks for a slice by name must not land on a whole GPU, nor the reverse
        offers = [offer for offer in offers if offer.resource_name == resource_name]
    chosen = report.chosen_plan(
        best,
        expected,
        architecture=architecture,
        wishes=wished,
        terms=report.placement(best, offers, spec, image_architectures=image_architectures),
        resource_name=resource_name,
        candidates=candidates,
        unsaid=unsaid(best, spec, wished, offers),
    )
    return chosen.model_copy(update={"hash": plan_hash(chosen, spec, engine_version=engine_version)})


def consider(
    spec: ModelServeSpec,
    architecture: ModelArchitecture,
    accelerators: Sequence[AcceleratorOffer],
    *,
    learned: Learned = NOTHING_LEARNED,
    weight_format: WeightFormat | None = None,
    assistants: Mapping[str, AssistantFacts] = NO_FACTS,
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
) -> tuple[Considered, ...]:
    """Every product and number of GPUs that the spec allows: those that fit first, the best before the others."""
    wished = _wishes(
        spec, architecture, learned=learned, weight_format=weight_format, assistants=assistants,
        image_architectures=image_architectures, images=images, audio=audio,
    )  # fmt: skip
    costs = _costs(spec)
    found = []
    allowed = _allowed(spec, accelerators)
    for accelerator, gpus, pools in _combinations(spec, wished, [offer for offer in allowed if not offer.refused]):
        result = _placed(evaluate_drafted(wished, architecture, accelerator, gpus=gpus), wished, pools=pools)
        result = hosted(result, spec, wished, pools)
        if isinstance(result, Fit):
            expected = speed(result, architecture, wished)
            found.append(Considered(result, rank_key(result, expected, wished, costs=costs), expected))
        else:
            found.append(Considered(result))
    found += [Considered(_shared(offer)) for offer in allowed if offer.refused]
    fits = sorted((c for c in found if c.rank is not None), key=lambda c: c.rank or ())
    refused = sorted((c for c in found if c.rank is None), key=lambda c: _refusal_key(c.evaluation))
    return (*fits, *refused)


def candidate_list(
    considered: Iterable[Considered],
    spec: ModelServeSpec,
    architecture: ModelArchitecture,
    *,
    learned: Learned = NOTHING_LEARNED,
    weight_format: WeightFormat | None = None,
    assistants: Mapping[str, AssistantFacts] = NO_FACTS,
    image_architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
) -> tuple[Candidate, ...]:
    """Candidates as status shows them; the first is Chosen when it fits. Refusals get remedies that were evaluated."""
    wished = _wishes(
        spec, architecture, learned=learned, weight_format=weight_format, assistants=assistants,
        image_architectures=image_architectures, images=images, audio=audio,
    )  # fmt: skip
    costs = _costs(spec)
    rows = []
    for index, entry in enumerate(considered):
        fit, expected = entry.evaluation, entry.expected
        if isinstance(fit, Refusal):
            remedy = fit.remedy or remedy_text(remedies(fit, architecture, wished.without_assistant))
            rows.append(report.refused_candidate(fit, remedy=remedy))
        elif expected is not None:
            verdict: Verdict = "Fits" if index else "Chosen"
            rows.append(
                report.fitting_candidate(
                    fit, expected, verdict=verdict, architecture=architecture, wishes=wished, costs=costs
                )
            )
    return tuple(rows)


def _wishes(
    spec: ModelServeSpec,
    architecture: ModelArchitecture,
    *,
    learned: Learned,
    weight_format: WeightFormat | None,
    assistants: Mapping[str, AssistantFacts],
    image_architectures: tuple[str, ...],
    images: ImageArchitecture | None,
    audio: AudioArchitecture | None,
) -> Wishes:
    found = wishes(
        spec,
        learned=learned,
        weight_format=weight_format,
        assistants=assistants,
        image_architectures=image_architectures,
        images=images,
        audio=audio,
    )
    if found.adapters is not None:
        found = replace(found, adapted=architecture)
    return found if found.drafts is None else replace(found, drafts=found.drafts.of_target(architecture))


def _resource_name(best: Fit, offers: Sequence[AcceleratorOffer]) -> str | None:
    """What the pods ask for; where pools of a product differ in that, the plan is for the first."""
    names = sorted(offer.resource_name for offer in offers if offer.largest_replica >= best.gpus)
    return None if best.accelerator.is_cpu else (names or [GPU_RESOURCE])[0]


def _allowed(spec: ModelServeSpec, accelerators: Sequence[AcceleratorOffer]) -> list[AcceleratorOffer]:
    """Offers of the products named, or of every GPU; the CPU only where it is named, and then without being offered."""
    products = spec.accelerators.products if spec.accelerators else None
    gpus = [offer for offer in accelerators if not offer.accelerator.is_cpu]
    if products is None:
        return gpus
    offered = next((offer for offer in accelerators if offer.accelerator.is_cpu), CPU_OFFER)
    cpu = replace(offered, accelerator=on_nodes(offered.accelerator, node_selector(spec)))
    return [offer for offer in gpus if offer.accelerator.product in products] + [cpu] * (CPU_PRODUCT in products)


def _combinations(
    spec: ModelServeSpec, wished: Wishes, offers: Sequence[AcceleratorOffer]
) -> Iterable[tuple[Accelerator, int, Sequence[AcceleratorOffer]]]:
    """(accelerator, GPUs of a replica, pools of the product) to consider, in a fixed order.

    Pools of one product and the same CPUs count as the one with the least memory, so that a plan holds on each of them.
    """
    by_kind: dict[tuple[str, str], list[AcceleratorOffer]] = {}
    for offer in sorted(offers, key=lambda o: (*_kind(o.accelerator), o.count)):
        by_kind.setdefault(_kind(offer.accelerator), []).append(offer)
    for pools in by_kind.values():
        largest = max(pool.largest_replica for pool in pools)
        if pools[0].accelerator.is_cpu:
            counts: tuple[int, ...] = (0,)
        elif wished.tensor_parallel:
            counts = (wished.tensor_parallel,)
        else:
            counts = tuple(n for n in GPU_COUNTS if n <= min(largest, wished.max_per_replica)) or (1,)
        for gpus in counts:
            enough = [pool for pool in pools if pool.largest_replica >= gpus] or [pools[-1]]
            holding = with_room(enough, spec, wished, gpus=gpus) or enough
            yield min((pool.accelerator for pool in holding), key=lambda record: record.visible_bytes), gpus, pools


def _kind(accelerator: Accelerator) -> tuple[str, str]:
    """What pods of one plan cannot mix: their image is of one architecture, and GPUs of a product."""
    return accelerator.product, accelerator.architecture


def _shared(offer: AcceleratorOffer) -> Refusal:
    """A pool that no replica can be planned on."""
    return Refusal(offer.accelerator, 1, 1, "Sharing", offer.refused or "")


def _placed(result: Evaluation, wished: Wishes, *, pools: Sequence[AcceleratorOffer]) -> Evaluation:
    """Refuse what fits the GPUs but no node: a replica is one pod on one node."""
    node_count = max(pool.largest_replica for pool in pools)
    if isinstance(result, Refusal) or result.gpus <= node_count:
        return result
    message = (
        f"parallelism.tensor {wished.tensor_parallel} needs {result.gpus} GPUs on one node; nodes have {node_count}"
    )
    if is_mig_slice(result.accelerator.product):
        message = (
            f"parallelism.tensor {wished.tensor_parallel}: MIG slices cannot talk to each other, so a replica has one"
        )
    return Refusal(result.accelerator, result.gpus, result.tensor_parallel, "GPUsPerNode", message)


def _refusal_key(evaluation: Evaluation) -> tuple[int, int, str, int]:
    """Nearest to fitting first: other reasons before memory, then the least bytes missing."""
    shortfall = evaluation.shortfall_bytes if isinstance(evaluation, Refusal) else None
    return (int(shortfall is not None), shortfall or 0, evaluation.accelerator.product, evaluation.gpus)


def _best_per_product(considered: Iterable[Considered]) -> list[Considered]:
    best: dict[str, Considered] = {}
    for entry in considered:
        best.setdefault(entry.evaluation.accelerator.product, entry)
    return list(best.values())


def _costs(spec: ModelServeSpec) -> Mapping[str, Decimal]:
    prices = spec.accelerators.cost_per_hour if spec.accelerators else {}
    return {product: Decimal(price) for product, price in prices.items()}
