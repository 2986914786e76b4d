"""Evaluations as status shows them: integers in bytes, decimal strings, and sentences with the numbers in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from modelserve.api.model_adapter import AdaptersPlan
from modelserve.api.spec import ModelServeSpec
from modelserve.api.speed import ExpectedDrafts, ExpectedReuse, ExpectedSpeed, TimeTerms
from modelserve.api.status import (
    MAX_SPEED_FACTORS,
    MAX_TERMS,
    Candidate,
    Concurrency,
    EnginePlan,
    GpuMemory,
    KVCachePlan,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    PlanStatus,
    RequestBytes,
    Verdict,
)
from modelserve.hardware import ARCH_LABEL
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.drafts_report import drafts_status, drafts_text, measured_acceptance, planned_drafter
from modelserve.planning.evaluation import Fit, Refusal
from modelserve.planning.learned import AS_EXPECTED
from modelserve.planning.media.audio import audio_plan, audio_text
from modelserve.planning.media.images import image_plan, image_text
from modelserve.planning.other_settings import other_settings, places
from modelserve.planning.pools.offers import PRODUCT_LABEL, AcceleratorOffer
from modelserve.planning.ranking import replica_cost, token_cost
from modelserve.planning.speed.expected_reuse import Reuse, expected_reuse
from modelserve.planning.speed.expected_speed import Speed, mixed_step_tokens, step_factors
from modelserve.planning.speed.step_time import StepTime
from modelserve.planning.wishes import DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS, Wishes
from modelserve.sizing.memory import MemoryPlan
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS, KVCacheDtype
from modelserve.sizing.prefixes import window_bytes
from modelserve.units import GIB

LENGTHS = {"at8k": 8_192, "at32k": 32_768, "at128k": 131_072}


def chosen_plan(
    fit: Fit,
    expected: Speed,
    *,
    architecture: ModelArchitecture,
    wishes: Wishes,
    terms: tuple[NodeSelectorTerm, ...] | None,
    resource_name: str | None,
    candidates: tuple[Candidate, ...],
    unsaid: str = "",
) -> PlanStatus:
    """The whole plan but its hash. `unsaid`: what pods ask of nodes that nobody knows yet."""
    least = wishes.least_model_len(architecture.max_position_embeddings)
    on_cpu = fit.accelerator.is_cpu
    return PlanStatus(
        accelerator=fit.accelerator.product,
        resource_name=resource_name,
        gpus_per_replica=fit.gpus,
        node_selector_terms=terms,
        tensor_parallel=fit.tensor_parallel,
        max_model_len=fit.max_model_len,
        container_memory_bytes=fit.memory.total_bytes if on_cpu else None,
        kv_cache=KVCachePlan(dtype=fit.geometry.dtype, layout=fit.geometry.layout),
        host_cache_bytes=wishes.host_cache_bytes(fit.accelerator) or None,
        adapters=_adapters(fit, wishes),
        images=image_plan(wishes.images, fit.memory, gpus=fit.gpus),
        audio=audio_plan(wishes.audio, fit.memory, gpus=fit.gpus, sees=wishes.images is not None),
        engine=EnginePlan(
            max_num_batched_tokens=wishes.chunk(fit.accelerator),
            max_num_mixed_tokens=mixed_step_tokens(fit, architecture, wishes),
            max_num_seqs=fit.sequences,
            min_model_len=min(least, fit.max_model_len),
            gpu_memory_utilization=f"{wishes.utilization:f}",
            profile="exact" if wishes.exact else None,
        ),
        drafter=planned_drafter(fit, wishes),
        per_gpu=gpu_memory(fit.memory),
        per_request=request_bytes(fit),
        concurrency=concurrency(fit),
        target_concurrency=expected.load.requests,
        message="; ".join(filter(None, (_plan_message(fit, architecture, wishes, expected), unsaid))),
        speed_factors=wishes.learned.speed[:MAX_SPEED_FACTORS] or None,
        **measured_acceptance(wishes),
        candidates=candidates,
    )


def fitting_candidate(
    fit: Fit,
    expected: Speed,
    *,
    verdict: Verdict,
    architecture: ModelArchitecture,
    wishes: Wishes,
    costs: Mapping[str, Decimal],
) -> Candidate:
    """A candidate that fits, with its arithmetic."""
    cost = replica_cost(fit, costs)
    reuse = expected_reuse(fit, architecture, wishes)
    per_million = None if cost is None else token_cost(cost, expected)
    return Candidate(
        accelerator=fit.accelerator.product,
        gpus_per_replica=fit.gpus,
        tensor_parallel=fit.tensor_parallel,
        verdict=verdict,
        limited_by=fit.limited_by,
        message=_reservations(fit, wishes) or None,
        max_model_len=fit.max_model_len,
        kv_cache=KVCachePlan(dtype=fit.geometry.dtype, layout=fit.geometry.layout),
        per_gpu=gpu_memory(fit.memory),
        concurrency=concurrency(fit),
        speed=expected_speed(
            expected, with_terms=verdict == "Chosen", drafts=drafts_status(expected, fit, architecture, wishes)
        ),
        reuse=None if reuse is None else reuse_status(reuse, host=bool(wishes.host_cache_bytes(fit.accelerator))),
        cost_per_hour=None if cost is None else f"{cost:.2f}",
        cost_per_million_tokens=None if per_million is None else f"{per_million:.2f}",
    )


def expected_speed(expected: Speed, *, with_terms: bool, drafts: ExpectedDrafts | None = None) -> ExpectedSpeed:
    """Expected rates in milliseconds and tokens per second."""
    first, token = expected.at_load.first_token, expected.at_load.output_token
    return ExpectedSpeed(
        concurrency=expected.load.requests,
        time_to_first_token_ms=f"{first.seconds * 1e3:.1f}",
        time_per_output_token_ms=f"{token.seconds * 1e3:.2f}",
        output_tokens_per_second=f"{expected.output_tokens_per_s:.1f}",
        drafts=drafts,
        first_token=_time_terms(first, digits=1) if with_terms else None,
        output_token=_time_terms(token, digits=2) if with_terms else None,
    )


def reuse_status(reuse: Reuse, *, host: bool) -> ExpectedReuse:
    """Percent, bytes and milliseconds. `host`: host memory was asked for."""
    several = reuse.load.turns > 1
    return ExpectedReuse(
        gpu_percent=f"{100 * reuse.from_gpu:.1f}",
        host_percent=f"{100 * reuse.from_host:.1f}",
        computed_percent=f"{100 * (1 - reuse.from_gpu - reuse.from_host):.1f}",
        session_bytes=reuse.session_bytes,
        sessions_on_gpu=f"{reuse.sessions_on_gpu:.1f}",
        sessions_in_host=f"{reuse.sessions_in_host:.1f}",
        next_turn_ms=f"{1e3 * reuse.next_turn_s:.1f}" if several else None,
        next_turn_from_host_ms=f"{1e3 * reuse.next_turn_from_host_s:.1f}" if several and host else None,
        next_turn_computed_ms=f"{1e3 * reuse.next_turn_computed_s:.1f}" if several else None,
    )


def _time_terms(time: StepTime, *, digits: int) -> TimeTerms:
    shown = {name: f"{seconds * 1e3:.{digits}f}" for name, seconds in time._asdict().items()}
    return TimeTerms(**{name: text for name, text in shown.items() if float(text)})


def refused_candidate(refusal: Refusal, *, remedy: str | None) -> Candidate:
    """A candidate that cannot serve, with what is missing and what would help."""
    return Candidate(
        accelerator=refusal.accelerator.product,
        gpus_per_replica=refusal.gpus,
        tensor_parallel=refusal.tensor_parallel,
        verdict="Refused",
        limited_by=refusal.limited_by,
        shortfall_bytes=refusal.shortfall_bytes,
        message=refusal.message,
        remedy=remedy,
        per_gpu=gpu_memory(refusal.memory) if refusal.memory else None,
    )


def no_plan(candidates: Sequence[Candidate], spec: ModelServeSpec) -> str:
    """Why nothing fits, by the candidate that came nearest."""
    if not candidates:
        named = spec.accelerators.products if spec.accelerators else None
        if named:
            return f"no accelerator of the products {', '.join(named)} is offered"
        return "no accelerator is offered; the CPU is used only where accelerators.products names CPU"
    nearest = candidates[0]
    sentence = (
        f"no candidate fits; nearest is {_label(nearest.accelerator, nearest.gpus_per_replica)}: {nearest.message}"
    )
    return sentence + (f"; {nearest.remedy}" if nearest.remedy else "")


def placement(
    fit: Fit, offers: Sequence[AcceleratorOffer], spec: ModelServeSpec, *, image_architectures: Sequence[str]
) -> tuple[NodeSelectorTerm, ...]:
    """The terms of each pool that holds the replica, with the spec's own node selector. On the CPU any node will do
    whose architecture is one of the image's.

    Their order does not follow that of the offers, which other labels of the nodes decide.
    """
    selector = spec.accelerators.node_selector if spec.accelerators else {}
    own = tuple(
        NodeSelectorRequirement(key=key, operator="In", values=(value,)) for key, value in sorted(selector.items())
    )
    if fit.accelerator.is_cpu:
        runs = NodeSelectorRequirement(key=ARCH_LABEL, operator="In", values=tuple(image_architectures))
        return (NodeSelectorTerm(match_expressions=(*own, runs)),)
    product = NodeSelectorRequirement(key=PRODUCT_LABEL, operator="In", values=(fit.accelerator.product,))
    pools: dict[tuple[NodeSelectorRequirement, ...], None] = {}
    for offer in offers:
        if offer.largest_replica >= fit.gpus:
            for expressions in [term.match_expressions for term in offer.node_selector_terms] or [(product,)]:
                absent = {each.key for each in expressions if each.operator == "DoesNotExist"}
                if not absent & set(selector):
                    pools[(*expressions, *(each for each in own if each not in expressions))] = None
    ordered = sorted(pools, key=lambda terms: [(each.key, each.operator, each.values or ()) for each in terms])
    return tuple(NodeSelectorTerm(match_expressions=expressions) for expressions in ordered[:MAX_TERMS])


def gpu_memory(memory: MemoryPlan) -> GpuMemory:
    """The terms of a memory plan."""
    return GpuMemory(
        weights_bytes=memory.weights_bytes,
        activation_bytes=memory.activation_bytes,
        overhead_bytes=memory.overhead_bytes,
        kv_pool_bytes=memory.kv_pool_bytes,
    )


def request_bytes(fit: Fit) -> RequestBytes:
    """Bytes of one request at each length up to maxModelLen."""
    held = {
        f"{name}_bytes": fit.geometry.held_bytes(length)
        for name, length in LENGTHS.items()
        if length <= fit.max_model_len
    }
    return RequestBytes(at_max_bytes=fit.geometry.held_bytes(fit.max_model_len), **held)


def concurrency(fit: Fit) -> Concurrency:
    """Requests at once at each length up to maxModelLen."""
    at = {name: _requests(fit, length) for name, length in LENGTHS.items() if length <= fit.max_model_len}
    return Concurrency(at_max=_requests(fit, fit.max_model_len), **at)


def _requests(fit: Fit, length: int) -> str:
    return f"{fit.geometry.concurrency(fit.memory.kv_pool_bytes, length):.2f}"


def _label(product: str, gpus: int) -> str:
    return f"{gpus} x {product}" if gpus else product


def _plan_message(fit: Fit, architecture: ModelArchitecture, wishes: Wishes, expected: Speed) -> str:
    memory = fit.memory
    where = "the container" if fit.accelerator.is_cpu else "each GPU"
    arithmetic = (
        f"{_label(fit.accelerator.product, fit.gpus)}: of {memory.budget_bytes / GIB:.2f} GiB usable in {where}, "
        f"weights take {memory.weights_bytes / GIB:.2f}, workspace {memory.activation_bytes / GIB:.2f}, overhead "
        f"{memory.overhead_bytes / GIB:.2f}; the pool of {memory.kv_pool_bytes / GIB:.2f} GiB holds "
        f"{_requests(fit, fit.max_model_len)} requests of {fit.max_model_len:,} tokens at once"
    )
    sentences = [
        arithmetic,
        places(fit, wishes),
        other_settings(fit, architecture, wishes),
        _host_memory(fit, wishes),
        _adapters_text(_adapters(fit, wishes)),
        *_media_texts(fit, wishes),
        _found(fit, architecture, wishes),
        drafts_text(fit, architecture, wishes, expected),
        _reservations(fit, wishes),
    ]
    if fit.limited_by is None and wishes.max_model_len is None:
        sentences.append(f"maxModelLen is the model's own limit of {architecture.max_position_embeddings:,} tokens")
    return "; ".join(sentence for sentence in sentences if sentence)


def _adapters(fit: Fit, wishes: Wishes) -> AdaptersPlan | None:
    """Room for adapters; None where none was asked for."""
    limits = wishes.adapters
    if limits is None:
        return None
    return AdaptersPlan(
        max=limits.most,
        slots=limits.slots,
        rank=limits.rank,
        targets=limits.targets,
        slots_bytes=sum(term.bytes for term in fit.memory.terms if term.name == "adapters"),
        host_bytes=wishes.adapter_copies_bytes(fit.gpus),
    )


def _media_texts(fit: Fit, wishes: Wishes) -> tuple[str, str]:
    token = fit.geometry.global_page.page_bytes // GLOBAL_PAGE_TOKENS
    heard = audio_plan(wishes.audio, fit.memory, gpus=fit.gpus, sees=wishes.images is not None)
    return (
        image_text(image_plan(wishes.images, fit.memory, gpus=fit.gpus), bytes_per_token=token),
        audio_text(heard, bytes_per_token=token),
    )


def _adapters_text(room: AdaptersPlan | None) -> str:
    if room is None:
        return ""
    copies = f", and copies of {room.max} {room.host_bytes / GIB:.2f} GiB of host memory" if room.host_bytes else ""
    return f"{room.slots} slots for adapters of rank {room.rank} take {room.slots_bytes / GIB:.3f} GiB{copies}"


def _host_memory(fit: Fit, wishes: Wishes) -> str:
    """What kvCache.hostMemory is good for: the last windows that it holds, one where a request may resume."""
    if not wishes.host_memory_bytes:
        return ""
    if fit.accelerator.is_cpu:
        return "kvCache.hostMemory is for GPUs: the pool of a worker on the CPU is host memory"
    size, window = wishes.host_memory_bytes, window_bytes(fit.geometry) * fit.tensor_parallel
    kept = f"{size / GIB:.2f} GiB of host memory, in the pod's request and limit, keep prefixes that the pool gives up"
    if size < window:
        return f"{kept}, but the last window of one takes {window / GIB:.3f} GiB: too little for any"
    return f"{kept}: the last windows of {size // window:,}, or fewer with their rows of global layers"


def _found(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> str:
    """What the prefix cache is expected to find, with what it follows from."""
    reuse = expected_reuse(fit, architecture, wishes)
    if reuse is None:
        return ""
    load = reuse.load
    text = f"of prompt tokens {reuse.from_gpu:.0%} should be found in the pool"
    if wishes.host_cache_bytes(fit.accelerator):
        text += f" and {reuse.from_host:.0%} in host memory"
    size = reuse.session_bytes / GIB
    text += (
        f": beside {load.requests:,} {'request' if load.requests == 1 else 'requests'} in progress it has room for "
        f"{reuse.sessions_on_gpu:.1f} waiting sessions of {size:.2f} GiB, and {load.waiting:,} wait"
    )
    if wishes.turns and load.turns < wishes.turns:
        text += f"; {load.turns:,} of {wishes.turns:,} turns fit {fit.max_model_len:,} tokens"
    return text


def _workload_reservations(fit: Fit, wishes: Wishes) -> Iterator[str]:
    """Where the expected requests are more or longer than the candidate holds, so that its times are of fewer."""
    expected = wishes.input_tokens + wishes.output_tokens
    length = min(expected, fit.max_model_len)
    held = fit.geometry.requests(fit.memory.kv_pool_bytes, length)
    if length < expected and expected != DEFAULT_INPUT_TOKENS + DEFAULT_OUTPUT_TOKENS:
        yield f"requests of {expected:,} tokens are expected, above maxModelLen: times are of {length:,}"
    if wishes.concurrency and held < wishes.concurrency:
        yield f"{wishes.concurrency:,} requests of {length:,} tokens are expected at once, and the pool holds {held:,}"


def _reservations(fit: Fit, wishes: Wishes) -> str:
    """Where the candidate gives less than was asked, or than the model could; and what was measured of its speed."""
    notes = []
    factors = step_factors(fit, wishes)
    if factors != AS_EXPECTED:
        measured = ", ".join(f"{name} {factor:.2f}" for name, factor in factors._asdict().items())
        notes.append(f"expected times are corrected by what workers measured of such steps: {measured}")
    if wishes.exact and not fit.accelerator.is_cpu:
        notes.append("the expected times of profile exact are assumed, not measured")
    chunk = wishes.chunk(fit.accelerator)
    for name, asked in (("maxNumSeqs", wishes.max_num_seqs), ("maxNumMixedTokens", wishes.max_num_mixed_tokens)):
        if asked and asked > chunk:
            notes.append(f"{name} is {chunk:,} instead of {asked:,}, the maxNumBatchedTokens of a step")
    if fit.downgraded:
        length = wishes.max_model_len or wishes.min_model_len or 0
        found = wishes.learned.quality(fit.accelerator.product, fit.geometry.dtype, fit.geometry.layout)
        why = f"; measured on these weights: {found.figures}" if found is not None else ""
        notes.append(f"int8 cache, because {length:,} tokens do not fit in the weights' dtype{why}")
    if fit.withheld:
        notes.append(
            wishes.learned.why_withheld(
                fit.withheld, fit.accelerator.product, KVCacheDtype.INT8, fit.geometry.layout
            )
        )  # fmt: skip
    notes += _workload_reservations(fit, wishes)
    notes += [*filter(None, [fit.undrafted]), *(wishes.drafts.notes if wishes.drafts else ())]
    if fit.shortened:
        notes.append(
            f"maxModelLen is {fit.max_model_len:,} instead of {wishes.max_model_len:,}: the pool holds no more"
        )
    elif fit.limited_by == "Memory":
        notes.append(f"the pool bounds a request at {fit.max_model_len:,} tokens")
    return "; ".join(notes)
