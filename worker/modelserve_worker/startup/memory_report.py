"""Reports what the memory of one rank really went to: the measured side of /v1/plan. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelserve.model.architecture import LayerKind
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.pages import CacheGeometry


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank; over ranks, the pool is the smallest and the other terms are the largest.

    budget = weights + activation + overhead + pool + slack below one alignment unit, unless another rank had less room,
    and but for graphs: the pool leaves what they were predicted to take, and `overhead` has what they took.
    """

    device: str  # "cpu", or the GPU's product name
    total_bytes: int  # memory of the device, or of the container on the CPU
    budget_bytes: int  # the share of it that the worker may use
    weights_bytes: int
    activation_bytes: int  # peak of one step of max_num_batched_tokens tokens
    # Everything else, by name: context, other_processes, graphs, nccl; process and headroom on the CPU.
    overhead: Mapping[str, int]
    pool_bytes: int
    geometry: CacheGeometry
    max_model_len: int  # what is served: the asked length, or less when the pool is smaller
    weight_format: WeightFormat | None = None  # None: unquantised, in the architecture's dtype

    @property
    def overhead_bytes(self) -> int:
        """Sum of `overhead`."""
        return sum(self.overhead.values())

    def num_pages(self, kind: LayerKind) -> int:
        """Pages of one kind that the whole pool would hold; 0 when no layer of that kind owns a cache."""
        page_bytes = self.geometry.page(kind).page_bytes
        return self.pool_bytes // page_bytes if page_bytes else 0
