"""Whether nodes have the memory and the processors that a replica's pod asks for beside its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from modelserve.api.pod import ResourceRequirements
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import LimitedBy
from modelserve.planning.evaluation import Evaluation, Fit, Refusal
from modelserve.planning.pools.host_capacity import UNKNOWN, HostCapacity, gib
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.pools.pod_resources import HostRequest, host_request
from modelserve.planning.wishes import Wishes
from modelserve.units import GIB, MIB

Stated = tuple[tuple[str, str], ...]


def with_room(
    offers: Sequence[AcceleratorOffer], spec: ModelServeSpec, wishes: Wishes, *, gpus: int
) -> list[AcceleratorOffer]:
    """The pools whose nodes hold such a pod, as far as that is known; all for the CPU, whose pods any node may take."""
    if not gpus or all(offer.host == UNKNOWN for offer in offers):
        return list(offers)
    asked = _asked(spec, wishes, gpus)
    return [offer for offer in offers if offer.host.lacks(asked) is None]


def hosted(result: Evaluation, spec: ModelServeSpec, wishes: Wishes, pools: Sequence[AcceleratorOffer]) -> Evaluation:
    """Refuse what fits the GPUs of nodes that lack memory or processors for its pod."""
    enough = [pool for pool in pools if pool.largest_replica >= result.gpus]
    if isinstance(result, Refusal) or not enough or with_room(enough, spec, wishes, gpus=result.gpus):
        return result
    asked = _asked(spec, wishes, result.gpus)
    host = max((pool.host for pool in enough), key=lambda each: (each.lacks(asked) != "HostMemory", each))
    where = f"the largest node with {result.gpus} x {result.accelerator.product}"
    remedy = f"fits {_remedy(spec, wishes, result, host)}"
    if host.lacks(asked) == "HostMemory":
        missing = asked.memory_bytes - host.memory_bytes
        message = (
            f"the pod asks its node for {gib(asked.memory_bytes)} of memory{_pinned(wishes, result.gpus)}, {where} has "
            f"{gib(host.memory_bytes)} allocatable: {gib(missing)} missing"
        )
        return _refused(result, message, "HostMemory", remedy, missing)
    message = f"the pod asks its node for {asked.cpu:f} CPUs, {where} has {host.cpu_millis / 1000:g} allocatable"
    return _refused(result, message, "Cpu", remedy, None)


def unsaid(fit: Fit, spec: ModelServeSpec, wishes: Wishes, offers: Sequence[AcceleratorOffer]) -> str:
    """What pods ask for where no node tells whether it has that: of pools that are empty, declared or named alone."""
    enough = [offer for offer in offers if offer.largest_replica >= fit.gpus]
    if not fit.gpus or any(offer.host.memory_bytes and offer.host.cpu_millis for offer in enough):
        return ""
    asked = _asked(spec, wishes, fit.gpus)
    return (
        f"no node tells yet whether it has the {asked.cpu:f} CPUs and {gib(asked.memory_bytes)} of memory that a pod "
        "asks for"
    )


def _asked(spec: ModelServeSpec, wishes: Wishes, gpus: int) -> HostRequest:
    pinned = wishes.host_memory_bytes + wishes.adapter_copies_bytes(gpus) + wishes.media_host_bytes(gpus)
    return _request(*_users(spec), ranks=gpus, pinned_bytes=pinned, decoders=wishes.decoders(gpus))


@lru_cache(maxsize=1024)  # every pool of every product asks
def _request(requests: Stated, limits: Stated, *, ranks: int, pinned_bytes: int, decoders: int = 0) -> HostRequest:
    users = {"requests": dict(requests), "limits": dict(limits)}
    return host_request(users, ranks=ranks, pinned_bytes=pinned_bytes, decoders=decoders)


def _users(spec: ModelServeSpec) -> tuple[Stated, Stated]:
    """Requests and limits that the spec states."""
    stated = spec.pod.resources or ResourceRequirements()
    return tuple(sorted(stated.requests.items())), tuple(sorted(stated.limits.items()))


def _pinned(wishes: Wishes, gpus: int) -> str:
    parts = (
        (wishes.host_memory_bytes, "kvCache.hostMemory"),
        (wishes.adapter_copies_bytes(gpus), "adapters"),
        (wishes.image_host_bytes(gpus), "images"),
        (wishes.audio_host_bytes(gpus), "sounds"),
    )
    told = " and ".join(f"{gib(size)} of it {name}" for size, name in parts if size)
    return f" ({told})" if told else ""


def _refused(fit: Fit, message: str, limited_by: LimitedBy, remedy: str, missing: int | None) -> Refusal:
    return Refusal(
        fit.accelerator, fit.gpus, fit.tensor_parallel, limited_by, message, shortfall_bytes=missing, remedy=remedy
    )


def _remedy(spec: ModelServeSpec, wishes: Wishes, fit: Fit, host: HostCapacity) -> str:
    """Changes after which the pod asks for no more than the node has."""
    asked = _asked(spec, wishes, fit.gpus)
    changes = []
    if host.lacks_memory(asked):
        changes.append(_less_memory(spec, wishes, fit, host))
    if host.lacks_cpu(asked):
        whole = host.cpu_millis // 1000
        changes.append(f"with pod.resources.requests.cpu {whole or f'{host.cpu_millis}m'}")
    return " and ".join(changes)


def _less_memory(spec: ModelServeSpec, wishes: Wishes, fit: Fit, host: HostCapacity) -> str:
    users = _users(spec)
    if "memory" in dict(users[0]):
        return f"with pod.resources.requests.memory {host.memory_bytes // MIB}Mi"
    copies, seen = wishes.adapter_copies_bytes(fit.gpus), wishes.media_host_bytes(fit.gpus)
    left = host.memory_bytes - _request(*users, ranks=fit.gpus, pinned_bytes=copies + seen).memory_bytes
    if wishes.host_memory_bytes and left >= GIB:
        return f"with kvCache.hostMemory {left // GIB}Gi"
    if wishes.host_memory_bytes and left >= 0:
        return "with kvCache.hostMemory left out"
    if copies and wishes.adapters is not None:
        room = host.memory_bytes - _request(*users, ranks=fit.gpus, pinned_bytes=seen).memory_bytes
        if (fewer := room * wishes.adapters.most // copies) >= 1:
            return f"with adapters.max {fewer}"
    if seen and host.memory_bytes >= _request(*users, ranks=fit.gpus, pinned_bytes=copies).memory_bytes:
        taken = [name for name, each in (("image", wishes.images), ("audio", wishes.audio)) if each is not None]
        return f"with modalities.{taken[0]} left out" if len(taken) == 1 else "with modalities left out"
    return f"on nodes with {gib(_asked(spec, wishes, fit.gpus).memory_bytes)} of allocatable memory"
