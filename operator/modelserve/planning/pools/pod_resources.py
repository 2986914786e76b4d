"""What a worker's pod asks its node for beside GPUs: memory and processors. Plans and pods read the same figures.

Without requests a GPU pod is BestEffort, the first to be evicted; without limits a LimitRange's default (512 MiB, say)
becomes its limit; and a quota on requests admits no container that states none. The weights are no part of the memory:
they are mapped, and their pages can be reclaimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from modelserve.api.schema_types import quantity_value
from modelserve.sizing.host.front_end import KNOWN_TEXTS_BYTES, OPEN_BODIES_BYTES, PREPARATION_BYTES
from modelserve.sizing.host.grammars import GRAMMARS_BYTES
from modelserve.units import GIB

# Anonymous memory of a worker on GPUs, from peaks that tests/bench/engine/host_memory.py measures (docs/operations.md,
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

Sides = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class HostRequest:
    """What the scheduler sets aside of a node for one pod. `cpu` in processors."""

    memory_bytes: int
    cpu: Decimal


def own_memory_bytes(ranks: int) -> int:
    """Of a worker on GPUs, without what is pinned for cached prefixes."""
    memory = FRONT_END_BYTES + GRAMMARS_BYTES + ranks * (ENGINE_BYTES + CUDA_BYTES)
    return memory + SHARED_MEMORY_BYTES * (ranks > 1)


def memory_and_cpu(
    users: Sides, *, ranks: int, container_memory_bytes: int | None = None, pinned_bytes: int = 0, decoders: int = 0
) -> dict[str, dict[str, str]]:
    """`requests` and `limits` of a worker's container with the user's own, by resource name.

    The user's figures win, but the memory limit on the CPU is `container_memory_bytes`, which the plan divides. A
    default yields to the user's other side: a request to a lower limit, a limit to a higher request. `pinned_bytes`:
    host memory for cached prefixes, in use from the first eviction on, and no page cache beside it. `decoders`:
    processors that decode images and sounds.
    """
    requests, limits = (dict(users.get(side) or {}) for side in ("requests", "limits"))
    if container_memory_bytes:
        limits["memory"] = str(container_memory_bytes)
        memory, cpu = container_memory_bytes, 1 + decoders
    else:
        memory, cpu = own_memory_bytes(ranks), 1 + ranks + decoders
    defaults = {
        "cpu": (cpu, max(CPU_LIMIT, CPU_LIMIT_FACTOR * cpu)),
        "memory": (memory + pinned_bytes, LIMIT_FACTOR * memory + pinned_bytes),
    }
    for name, (request, limit) in defaults.items():
        complete(requests, limits, name, request=request, limit=limit)
    return {"requests": requests, "limits": limits}


def complete(requests: dict[str, str], limits: dict[str, str], name: str, *, request: int, limit: int) -> None:
    """Fill in the sides of a resource that are left out, the limit at or above the request."""
    if name not in requests:
        requests[name] = _smaller(str(request), limits.get(name))
    if name not in limits:
        limits[name] = _larger(str(limit), requests[name])


def host_request(users: Sides, *, ranks: int, pinned_bytes: int, decoders: int = 0) -> HostRequest:
    """What a worker on so many GPUs asks of its node."""
    asked = memory_and_cpu(users, ranks=ranks, pinned_bytes=pinned_bytes, decoders=decoders)["requests"]
    return HostRequest(int(quantity_value(asked["memory"])), quantity_value(asked["cpu"]))


def _smaller(default: str, other: str | None) -> str:
    return other if other is not None and quantity_value(other) < quantity_value(default) else default


def _larger(default: str, other: str) -> str:
    if quantity_value(other) <= quantity_value(default):
        return default
    return str(quantity_value(other).to_integral_value(ROUND_CEILING))
