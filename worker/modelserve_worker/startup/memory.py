"""Measures how large the cache pool of a rank may be, and finds the longest request that fits in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType

import torch

from modelserve.engine_args import EngineArgs
from modelserve.errors import DoesNotFit, InvalidInput
from modelserve.inspection import read_rank_settings
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.memory import cpu_media_bytes, memory_plan, overhead_terms
from modelserve.sizing.pages import LAYER_ALIGNMENT_BYTES, CacheGeometry
from modelserve.termination import TerminationReason
from modelserve_worker.startup.container_limits import MEMORY_LIMITS, meminfo_bytes, memory_limit_bytes

UNLIMITED_CPU_SHARE = Decimal("0.5")  # of available memory, where neither EngineArgs nor a cgroup sets a limit


class InsufficientMemory(DoesNotFit):
    """The pool cannot hold one request of min_model_len tokens; `shortfall_bytes` more per rank would do.

    `measured`: bytes of the terms that left so little, on a GPU.
    """

    reason = TerminationReason.InsufficientMemory
    measured: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one rank before its pool exists; `overhead` by name: what lies outside the engine's own tensors, and
    what graphs of its steps will take."""

    total_bytes: int
    budget_bytes: int
    weights_bytes: int
    activation_bytes: int
    overhead: Mapping[str, int]

    @property
    def overhead_bytes(self) -> int:
        """Sum of `overhead`."""
        return sum(self.overhead.values())

    @property
    def left_bytes(self) -> int:
        """Budget less all terms, rounded down to the arena's alignment; negative when they alone do not fit."""
        left = self.budget_bytes - self.weights_bytes - self.activation_bytes - self.overhead_bytes
        return left // LAYER_ALIGNMENT_BYTES * LAYER_ALIGNMENT_BYTES


class GPUMemoryProbe:
    """Measures one rank on its GPU. Call in this order: create it before the rank joins its group, `joined` after,
    `loaded` when only the weights are allocated, `measure` after the profile step, `captured` once the pool exists."""

    def __init__(self, device: torch.device, *, used_before: int = 0) -> None:
        """`used_before`: bytes of the device that others held before this process had a context there."""
        self._device = device
        torch.empty(1, device=device)  # creates the context, which is then told apart from the communicator
        self._alone = self._outside_bytes()
        self._own_context = max(0, self._alone - used_before)
        self._communicator: int | None = None
        self._peer_bytes = 0
        self._weights = 0

    def joined(self, *, peer_bytes: int) -> None:
        """Whatever the driver has handed out since the probe was created belongs to the communicator, but for
        `peer_bytes` of buffers that other ranks write into."""
        self._peer_bytes = peer_bytes
        self._communicator = max(0, self._outside_bytes() - self._alone - peer_bytes)

    def loaded(self) -> None:
        """What torch has reserved now, the rounding of its blocks included, is the weights."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._weights = torch.cuda.memory_reserved(self._device)

    def measure(
        self, utilization: float, *, scratch_bytes: int, graphs_bytes: int, beside_graphs_bytes: int
    ) -> MemoryUse:
        """Activation is the peak that torch reserved over the weights and the profile's own cache of `scratch_bytes`,
        and `beside_graphs_bytes` of what steps do not capture and graphs leave no room for;
        overhead is what graphs are predicted to take, which are captured only after the pool exists, and all of the
        device that torch does not hold: the communicator, `context` (with kernels and libraries, which came later), and
        what other processes have."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(self._device)[1]
        outside = self._outside_bytes() - (self._communicator or 0) - self._peer_bytes
        context = min(outside, self._own_context + max(0, outside - self._alone))
        overhead = {"context": context, "other_processes": outside - context, "graphs": graphs_bytes}
        if self._communicator is not None:  # on every rank of a group, so that all ranks name the same terms
            overhead |= {"nccl": self._communicator, "peers": self._peer_bytes}
        return MemoryUse(
            total_bytes=total,
            budget_bytes=int(total * utilization),
            weights_bytes=self._weights,
            activation_bytes=peak - self._weights - scratch_bytes + beside_graphs_bytes,
            overhead=overhead,
        )

    def captured(self, capture: Callable[[], None]) -> int:
        """Run `capture`: bytes that it took from the device for good, torch's pools of the graphs included."""
        before = self._free_bytes()
        capture()
        return max(0, before - self._free_bytes())

    def _free_bytes(self) -> int:
        """Bytes of the device that are free once torch has given back what it only keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _outside_bytes(self) -> int:
        """Bytes of the device that are neither free nor torch's."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)


def cpu_memory_use(
    architecture: ModelArchitecture,
    geometry: CacheGeometry,
    args: EngineArgs,
    *,
    weight_format: WeightFormat | None,
    weights_bytes: int,
) -> MemoryUse:
    """The core's plan for this rank's share of the memory limit, with the weights that were really loaded.

    A process cannot measure its own peak on the CPU without the page cache of the files it mapped, so activation and
    overhead are the planned figures.
    """
    total = cpu_limit_bytes(args) // args.tensor_parallel_size
    settings = read_rank_settings(args, architecture, geometry, weight_format=weight_format, on_cpu=True)
    plan = memory_plan(architecture, settings, total_bytes=total, utilization=Decimal(1))
    overhead = overhead_terms(
        tensor_parallel_size=args.tensor_parallel_size, total_bytes=total, on_cpu=True,
        media=cpu_media_bytes(settings),
    )  # fmt: skip
    return MemoryUse(total, plan.budget_bytes, weights_bytes, plan.activation_bytes, overhead)


def cpu_limit_bytes(args: EngineArgs, *, cgroup_limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """Bytes all ranks may use on the CPU: cpu_memory_bytes, else the container's limit, else half of what is free."""
    if args.cpu_memory_bytes is not None:
        return args.cpu_memory_bytes
    limit = memory_limit_bytes(paths=cgroup_limits)
    return int(meminfo_bytes("MemAvailable") * UNLIMITED_CPU_SHARE) if limit is None else limit


def negotiate_model_len(
    architecture: ModelArchitecture, geometry: CacheGeometry, args: EngineArgs, *, pool_bytes: int
) -> int:
    """Tokens of the longest request to serve: what is asked, or what the pool holds when that is less.

    Raises InvalidInput when more is asked than the model can do, InsufficientMemory when the pool holds less than
    min_model_len.
    """
    longest = architecture.max_position_embeddings
    asked = longest if args.max_model_len == "auto" else args.max_model_len
    if asked > longest:
        raise InvalidInput(
            f"maxModelLen {asked} exceeds the model's {longest} positions; lower it", field="maxModelLen"
        )
    if args.min_model_len > asked:
        raise InvalidInput(
            f"minModelLen {args.min_model_len} exceeds maxModelLen {asked}; lower it", field="minModelLen"
        )  # fmt: skip
    possible = min(asked, geometry.longest_request(max(0, pool_bytes)))
    if possible < args.min_model_len:
        needed = geometry.held_bytes(args.min_model_len)
        raise InsufficientMemory(
            f"{max(0, pool_bytes)} bytes are left for the KV cache and one request of minModelLen {args.min_model_len} "
            f"tokens holds {needed}: {needed - pool_bytes} bytes are missing per device; lower minModelLen or "
            "maxNumBatchedTokens, choose an 8-bit KV cache, or give the worker more memory or devices",
            shortfall_bytes=needed - pool_bytes,
        )
    return possible
