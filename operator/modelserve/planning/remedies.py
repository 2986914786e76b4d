"""What would make a refused candidate fit. Every remedy was itself evaluated and fits; none is a guess."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from modelserve.hardware import CATALOGUE, Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import Evaluation, Fit, Refusal, evaluate
from modelserve.planning.pools.node_labels import is_mig_slice
from modelserve.planning.wishes import DEFAULT_UTILIZATION, GPU_COUNTS, Wishes
from modelserve.sizing.pages import KVCacheDtype
from modelserve.units import GIB

MAX_REMEDIES = 3
_BY_NUMBER = ("TensorParallel", "GPUsPerNode", "Architecture")  # refusals of a number of GPUs, not of their memory
WORTHWHILE_MODEL_LEN = 1024
SMALLEST_STEP = 256  # tokens; below it prompts take many steps, and the workspace gets hardly smaller


@dataclass(frozen=True)
class Remedy:
    """A change and the evaluation that proves it: `evaluate(wishes, ..., accelerator, gpus=gpus)` is a Fit."""

    text: str
    wishes: Wishes
    accelerator: Accelerator
    gpus: int


def remedies(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> tuple[Remedy, ...]:
    """At most three, the least change first."""
    found: dict[str, Remedy] = {}
    for remedy in _proposals(refusal, architecture, wishes):
        if remedy.text not in found and isinstance(_evaluated(remedy, architecture), Fit):
            found[remedy.text] = remedy
        if len(found) == MAX_REMEDIES:
            break
    return tuple(found.values())


def remedy_text(found: tuple[Remedy, ...]) -> str | None:
    """`fits ... or ...`, None when there is none."""
    return "fits " + ", or ".join(remedy.text for remedy in found) if found else None


def _evaluated(remedy: Remedy, architecture: ModelArchitecture) -> Evaluation:
    return evaluate(remedy.wishes, architecture, remedy.accelerator, gpus=remedy.gpus)


def _proposals(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """Least change first. A setting that nothing can satisfy is corrected; what more it takes is said with it."""
    device, gpus = refusal.accelerator, refusal.gpus
    built_for = wishes.image_architectures
    corrected, wishes = _corrected(refusal, architecture, wishes)
    if corrected:
        yield Remedy(corrected, wishes, device, gpus)
        if isinstance(evaluate(wishes, architecture, device, gpus=gpus), Fit):
            return
    for remedy in _resources(refusal, architecture, wishes):
        shorter = remedy.wishes.max_model_len != wishes.max_model_len  # corrects a length by itself
        elsewhere = refusal.limited_by == "Architecture" and remedy.accelerator.architecture in built_for
        alone = not corrected or elsewhere or (refusal.limited_by == "ContextLength" and shorter)
        yield remedy if alone else replace(remedy, text=f"{corrected} and {remedy.text}")


def _corrected(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> tuple[str, Wishes]:
    """(change, wishes after it) for a refusal that no amount of memory lifts; ("", the same wishes) for others."""
    if refusal.limited_by == "Layout":
        return "with kvCache.layout left out", replace(wishes, kv_layout=None)
    if refusal.limited_by == "ContextLength":
        longest = architecture.max_position_embeddings
        return f"at {longest:,} tokens", replace(wishes, max_model_len=longest, min_model_len=None)
    cpus = refusal.accelerator.architecture
    if refusal.limited_by == "Architecture" and cpus not in wishes.image_architectures:
        built = (*wishes.image_architectures, cpus)
        return f"with an image of the worker for {cpus}", replace(wishes, image_architectures=built)
    if refusal.limited_by == "TensorParallel" and refusal.accelerator.is_cpu:
        return "with parallelism.tensor left out", replace(wishes, tensor_parallel=None)
    return "", wishes


def _resources(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """The usual share of memory, a smaller cache, smaller steps, a shorter context, more memory, more GPUs, another
    product."""
    device, gpus = refusal.accelerator, refusal.gpus
    if refusal.limited_by == "Sharing":
        yield from _first_fit(_listed_places(), architecture, wishes)
        return
    if refusal.limited_by not in _BY_NUMBER:
        if wishes.utilization < DEFAULT_UTILIZATION and not device.is_cpu:
            usual = replace(wishes, utilization=DEFAULT_UTILIZATION)
            yield Remedy(f"with kvCache.gpuMemoryUtilization {DEFAULT_UTILIZATION} or left out", usual, device, gpus)
        if wishes.kv_dtype is not KVCacheDtype.INT8:
            yield Remedy("with int8 KV cache", replace(wishes, kv_dtype=KVCacheDtype.INT8), device, gpus)
        yield from _smaller_steps(refusal, architecture, wishes)
        yield from _shorter(refusal, architecture, wishes)
    if device.is_cpu:
        yield from _more_container_memory(refusal, architecture, wishes)
        return
    yield from _first_fit(((device, count) for count in _other_counts(refusal)), architecture, wishes)
    yield from _first_fit(_listed_places(), architecture, wishes)


def _listed_places() -> Iterator[tuple[Accelerator, int]]:
    """Every product of the catalogue, the fewest and smallest GPUs first."""
    records = sorted((r for r in CATALOGUE.values() if not r.is_cpu), key=lambda r: (r.memory_mib, r.product))
    return ((record, count) for count in GPU_COUNTS for record in records)


def _other_counts(refusal: Refusal) -> list[int]:
    """More GPUs; where the number itself is wrong, the nearest below first. Of MIG slices a replica has one."""
    if is_mig_slice(refusal.accelerator.product):
        return [1] if refusal.gpus > 1 else []
    more = [count for count in GPU_COUNTS if count > refusal.gpus]
    fewer = [count for count in reversed(GPU_COUNTS) if count < refusal.gpus]
    return fewer + more if refusal.limited_by in _BY_NUMBER else more


def _first_fit(
    places: Iterable[tuple[Accelerator, int]], architecture: ModelArchitecture, wishes: Wishes
) -> Iterator[Remedy]:
    """The first accelerator and number of GPUs that holds what was asked."""
    for accelerator, count in places:
        asked = replace(wishes, tensor_parallel=count, max_per_replica=max(count, wishes.max_per_replica))
        if isinstance(evaluate(asked, architecture, accelerator, gpus=count), Fit):
            node = " of one node" if count > 1 else ""
            if wishes.tensor_parallel not in (None, count):
                node += f" (parallelism.tensor {count}, or left out)"
            yield Remedy(f"on {count} x {accelerator.product}{node}", asked, accelerator, count)
            return


def _smaller_steps(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """The largest step of half the tokens, a quarter and so on whose workspace leaves enough room, and that still has a
    token for each request."""
    device, gpus = refusal.accelerator, refusal.gpus
    least = max(SMALLEST_STEP, wishes.sequences(device))
    tokens = wishes.chunk(device) // 2
    while tokens >= least:
        smaller = replace(wishes, max_num_batched_tokens=tokens)
        if isinstance(evaluate(smaller, architecture, device, gpus=gpus), Fit):
            yield Remedy(f"with engine.maxNumBatchedTokens {tokens}", smaller, device, gpus)
            return
        tokens //= 2


def _shorter(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """The longest context that does fit, in whole thousands, where it is worth having."""
    open_length = replace(wishes, max_model_len=None, min_model_len=WORTHWHILE_MODEL_LEN)
    found = evaluate(open_length, architecture, refusal.accelerator, gpus=refusal.gpus)
    if isinstance(found, Fit) and not found.downgraded:
        length = found.max_model_len // 1000 * 1000
        shorter = replace(wishes, max_model_len=length, min_model_len=None)
        yield Remedy(f"at {length:,} tokens", shorter, refusal.accelerator, refusal.gpus)


def _more_container_memory(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """The headroom is a share of the limit, so the limit must grow by a little more than what is missing."""
    found = evaluate(wishes, architecture, refusal.accelerator, gpus=refusal.gpus)
    if isinstance(found, Refusal) and found.shortfall_bytes is not None:
        needed = wishes.container_memory_bytes + found.shortfall_bytes * 100 // 94
        gib = -(-needed // GIB)
        larger = replace(wishes, container_memory_bytes=gib * GIB)
        yield Remedy(f"with pod.resources.limits.memory {gib}Gi", larger, refusal.accelerator, refusal.gpus)
