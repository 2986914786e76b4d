"""Requests and limits of every container, always with limits at or above the requests: memory and processors as plans
count them (`modelserve.planning.pools.pod_resources`), GPUs, and scratch space."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from modelserve.api import PlanStatus
from modelserve.hardware import GPU_RESOURCE
from modelserve.model.adapters.addresses import DOWNLOADS_BYTES
from modelserve.planning.pools.pod_resources import complete, memory_and_cpu
from modelserve.planning.pools.resource_slices import is_device_class
from modelserve.units import GIB

GPU_VENDOR = GPU_RESOURCE.partition("/")[0] + "/"

SCRATCH_BYTES = 4 * GIB  # /tmp: compiled kernels, logs, and what a download keeps beside the files
DOWNLOAD_FACTOR = Decimal("1.05")  # tokenizer and other files beside the weights

INSPECT_RESOURCES: dict[str, Any] = {
    "requests": {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
    "limits": {"cpu": "1", "memory": "512Mi", "ephemeral-storage": "1Gi"},
}


CACHE_RESOURCES: dict[str, Any] = {
    "requests": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "64Mi"},
    "limits": {"cpu": "4", "memory": "1Gi", "ephemeral-storage": "1Gi"},
}


def worker_resources(users: Mapping[str, Any], plan: PlanStatus, *, downloaded_bytes: int | None) -> dict[str, Any]:
    """Requests and limits of the worker. `downloaded_bytes`: weights that an emptyDir holds; None: a claim does.
    Adapters that are downloaded lie in scratch space always.

    The user's figures win, but GPUs are the plan's, and so is the memory limit on the CPU, which the plan divides.
    """
    pinned = (plan.host_cache_bytes or 0) + (plan.adapters.host_bytes if plan.adapters else 0)
    if not plan.container_memory_bytes:
        pinned += sum(taken.host_bytes for taken in (plan.images, plan.audio) if taken is not None)
    made = memory_and_cpu(
        {side: _without_gpus(users.get(side) or {}) for side in ("requests", "limits")},
        ranks=plan.tensor_parallel or 1,
        container_memory_bytes=plan.container_memory_bytes,
        pinned_bytes=pinned,
        decoders=sum(taken.decoders or 0 for taken in (plan.images, plan.audio) if taken is not None),
    )
    requests, limits = made["requests"], made["limits"]
    adapters = DOWNLOADS_BYTES if plan.adapters is not None else 0
    if downloaded_bytes is not None or adapters:
        weights = 0 if downloaded_bytes is None else int(downloaded_bytes * DOWNLOAD_FACTOR) + SCRATCH_BYTES
        scratch = weights + adapters
        complete(requests, limits, "ephemeral-storage", request=scratch, limit=scratch + SCRATCH_BYTES)
    if plan.resource_name and plan.gpus_per_replica and not is_device_class(plan.resource_name):
        limits[plan.resource_name] = str(plan.gpus_per_replica)
    return made


def download_resources(worker: Mapping[str, Any]) -> dict[str, Any]:
    """The init container's: the worker's without its GPUs. The larger of both counts, so it costs nothing more."""
    return {side: _without_gpus(worker[side]) for side in ("requests", "limits")}


def _without_gpus(resources: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in resources.items() if not name.startswith(GPU_VENDOR)}
