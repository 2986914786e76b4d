"""Linear layers split over a tensor-parallel group. Weights are [out, in], as in checkpoints; there are no biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve_worker.layers.parallel import Shard, TensorParallel


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, fused into one weight [sum of the shards' sizes, in].

    Each entry of `shards` is the share of one checkpoint matrix's rows that this rank holds; they are stacked in order.
    The output is this rank's columns only: no communication.
    """

    def __init__(self, in_features: int, *, shards: Sequence[Shard], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards = tuple(shards)
        rows = sum(shard.size for shard in self.shards)
        self.weight = nn.Parameter(torch.empty((rows, in_features), device=device, dtype=dtype), requires_grad=False)

    def stacked(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the shards' sizes]."""
        return functional.linear(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, in] -> one [T, shard size] per shard (views of one result)."""
        return torch.split(self.stacked(x), [shard.size for shard in self.shards], dim=-1)


class RowParallelLinear(nn.Module):
    """A projection whose input columns are split: weight [out, shard size], partial sums added over the ranks."""

    def __init__(
        self,
        out_features: int,
        *,
        shard: Shard,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.parallel = parallel
        self.weight = nn.Parameter(
            torch.empty((out_features, shard.size), device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, shard size] -> [T, out], the same on every rank."""
        return self.parallel.all_reduce(functional.linear(x, self.weight))


class ReplicatedLinear(nn.Module):
    """A small projection that every rank holds whole."""

    def __init__(self, in_features: int, out_features: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty((out_features, in_features), device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)
