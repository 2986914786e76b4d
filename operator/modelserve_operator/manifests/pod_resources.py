"""What pods ask for beside GPUs: processor, memory and scratch space, always with limits at or above the requests.

Without requests a GPU pod is BestEffort, the first to be evicted; without limits a LimitRange's default (512 MiB, say)
becomes its limit; and a quota on requests admits no container that states none. The weights are no part of the memory:
they are mapped, and their pages can be reclaimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any

from modelserve.api import PlanStatus
from modelserve.api.schema_types import quantity_value
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.resource_slices import is_device_class
from modelserve.sizing.front_end import KNOWN_TEXTS_BYTES, OPEN_BODIES_BYTES, PREPARATION_BYTES
from modelserve.sizing.grammars import GRAMMARS_BYTES
from modelserve.units import GIB

GPU_VENDOR = GPU_RESOURCE.partition("/")[0] + "/"

# Anonymous memory of a worker on GPUs, from peaks that tests/benchmarks/host_memory.py measures (docs/operations.md,
# "What pods ask for"). Loading adds nothing that grows with the weights: they are read through the page cache.
# Measured 0.58 with the published tokenizer.
FRONT_END_BYTES = 5 * GIB // 8 + OPEN_BODIES_BYTES + PREPARATION_BYTES + KNOWN_TEXTS_BYTES
ENGINE_BYTES = GIB // 2  # measured 0.33 per rank beside weights and pool
# Per rank. Measured 1.0 on an H200 with its kernels compiled (a context, its libraries, staging). A first start
# compiles them in at most ten processes (0.75 GiB in all, measured with eight), which end before it is ready.
CUDA_BYTES = 3 * GIB
SHARED_MEMORY_BYTES = GIB  # /dev/shm of a tensor-parallel group, which counts as memory
LIMIT_FACTOR = 2  # page cache lives between request and limit
CPU_LIMIT_FACTOR = 4  # and at least CPU_LIMIT
CPU_LIMIT = 4
SCRATCH_BYTES = 4 * GIB  # /tmp: compiled kernels, logs, and what a download keeps beside the files
DOWNLOAD_FACTOR = Decimal("1.05")  # tokenizer and other files beside the weights

INSPECT_RESOURCES: dict[str, Any] = {
    "requests": {"cpu": "50m", "memory": "128Mi", "ephemeral-storage": "64Mi"},
    "limits": {"cpu": "1", "memory": "512Mi", "ephemeral-storage": "1Gi"},
}


def worker_resources(users: Mapping[str, Any], plan: PlanStatus, *, downloaded_bytes: int | None) -> dict[str, Any]:
    """Requests and limits of the worker. `downloaded_bytes`: weights that an emptyDir holds; None: a claim does.

    The user's figures win, but GPUs are the plan's, and so is the memory limit on the CPU, which the plan divides. A
    default yields to the user's other side: a request to a lower limit, a limit to a higher request.
    """
    requests, limits = (_without_gpus(users.get(side) or {}) for side in ("requests", "limits"))
    ranks = plan.tensor_parallel or 1
    if plan.container_memory_bytes:
        limits["memory"] = str(plan.container_memory_bytes)
        memory, cpu = plan.container_memory_bytes, 1
    else:
        memory = FRONT_END_BYTES + GRAMMARS_BYTES + ranks * (ENGINE_BYTES + CUDA_BYTES)
        memory += SHARED_MEMORY_BYTES * (ranks > 1)
        cpu = 1 + ranks
    pinned = plan.host_cache_bytes or 0  # in use from the first eviction on, and no page cache beside it
    defaults = {
        "cpu": (cpu, max(CPU_LIMIT, CPU_LIMIT_FACTOR * cpu)),
        "memory": (memory + pinned, LIMIT_FACTOR * memory + pinned),
    }
    if downloaded_bytes is not None:
        scratch = int(downloaded_bytes * DOWNLOAD_FACTOR) + SCRATCH_BYTES
        defaults["ephemeral-storage"] = (scratch, scratch + SCRATCH_BYTES)
    for name, (request, limit) in defaults.items():
        if name not in requests:
            requests[name] = _smaller(str(request), limits.get(name))
        if name not in limits:
            limits[name] = _larger(str(limit), requests[name])
    if plan.resource_name and plan.gpus_per_replica and not is_device_class(plan.resource_name):
        limits[plan.resource_name] = str(plan.gpus_per_replica)
    return {"requests": requests, "limits": limits}


def download_resources(worker: Mapping[str, Any]) -> dict[str, Any]:
    """The init container's: the worker's without its GPUs. The larger of both counts, so it costs nothing more."""
    return {side: _without_gpus(worker[side]) for side in ("requests", "limits")}


def _without_gpus(resources: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in resources.items() if not name.startswith(GPU_VENDOR)}


def _smaller(default: str, other: str | None) -> str:
    return other if other is not None and quantity_value(other) < quantity_value(default) else default


def _larger(default: str, other: str) -> str:
    if quantity_value(other) <= quantity_value(default):
        return default
    return str(quantity_value(other).to_integral_value(ROUND_CEILING))
