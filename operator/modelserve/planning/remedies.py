"""What would make a refused candidate fit. Every remedy was itself evaluated and fits; none is a guess."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from modelserve.architecture import ModelArchitecture
from modelserve.hardware import CATALOGUE, Accelerator
from modelserve.planning.evaluation import GIB, Evaluation, Fit, Refusal, evaluate
from modelserve.planning.wishes import GPU_COUNTS, Wishes
from modelserve.sizing.pages import KVCacheDtype

MAX_REMEDIES = 3
WORTHWHILE_MODEL_LEN = 1024


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
    device, gpus = refusal.accelerator, refusal.gpus
    if refusal.limited_by == "Layout":
        wishes = replace(wishes, kv_layout=None)
        yield Remedy("with kvCache.layout left out", wishes, device, gpus)
    if refusal.limited_by == "ContextLength":
        longest = architecture.max_position_embeddings
        wishes = replace(wishes, max_model_len=longest, min_model_len=None)
        yield Remedy(f"at {longest:,} tokens", wishes, device, gpus)
    if refusal.limited_by in ("Memory", "ComputeCapability"):
        if wishes.kv_dtype is not KVCacheDtype.INT8:
            yield Remedy("with int8 KV cache", replace(wishes, kv_dtype=KVCacheDtype.INT8), device, gpus)
        yield from _shorter(refusal, architecture, wishes)
    if device.is_cpu:
        yield from _more_container_memory(refusal, wishes)
        return
    counts = _other_counts(refusal)
    yield from _first_fit(((device, count) for count in counts), architecture, wishes)
    records = sorted((r for r in CATALOGUE.values() if not r.is_cpu), key=lambda r: (r.memory_mib, r.product))
    yield from _first_fit(((record, count) for count in GPU_COUNTS for record in records), architecture, wishes)


def _other_counts(refusal: Refusal) -> list[int]:
    """More GPUs where memory is short; where the number itself is wrong, the nearest below first."""
    more = [count for count in GPU_COUNTS if count > refusal.gpus]
    return more if refusal.limited_by == "Memory" else [n for n in reversed(GPU_COUNTS) if n < refusal.gpus] + more


def _first_fit(
    places: Iterable[tuple[Accelerator, int]], architecture: ModelArchitecture, wishes: Wishes
) -> Iterator[Remedy]:
    """The first accelerator and number of GPUs that holds what was asked."""
    for accelerator, count in places:
        asked = replace(wishes, tensor_parallel=count, max_per_replica=max(count, wishes.max_per_replica))
        if isinstance(evaluate(asked, architecture, accelerator, gpus=count), Fit):
            node = " of one node" if count > 1 else ""
            yield Remedy(f"on {count} x {accelerator.product}{node}", asked, accelerator, count)
            return


def _shorter(refusal: Refusal, architecture: ModelArchitecture, wishes: Wishes) -> Iterator[Remedy]:
    """The longest context that does fit, in whole thousands, where it is worth having."""
    open_length = replace(wishes, max_model_len=None, min_model_len=WORTHWHILE_MODEL_LEN)
    found = evaluate(open_length, architecture, refusal.accelerator, gpus=refusal.gpus)
    if isinstance(found, Fit) and not found.downgraded:
        length = found.max_model_len // 1000 * 1000
        shorter = replace(wishes, max_model_len=length, min_model_len=None)
        yield Remedy(f"at {length:,} tokens", shorter, refusal.accelerator, refusal.gpus)


def _more_container_memory(refusal: Refusal, wishes: Wishes) -> Iterator[Remedy]:
    """The headroom is a share of the limit, so the limit must grow by a little more than what is missing."""
    if refusal.shortfall_bytes is None:
        return
    needed = wishes.container_memory_bytes + refusal.shortfall_bytes * 100 // 94
    gib = -(-needed // GIB)
    larger = replace(wishes, container_memory_bytes=gib * GIB)
    yield Remedy(f"with pod.resources.limits.memory {gib}Gi", larger, refusal.accelerator, refusal.gpus)
