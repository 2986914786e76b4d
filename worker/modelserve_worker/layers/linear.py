"""Linear layers split over a tensor-parallel group, each around a matrix as the checkpoint stores it.

Matrices are [out, in], as in checkpoints; there are no biases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelserve.model.weight_format import TextLinear
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.layers.adapter_rows import Read
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.stored_matrix import stored_matrix


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, fused into one matrix [sum of the shards' sizes, in].

    Each entry of `shards` is the share of one checkpoint matrix's rows that this rank holds; they are stacked in order.
    The output is this rank's columns only: no communication.
    """

    def __init__(self, linear: TextLinear, in_features: int, placement: Placement, *, shards: Sequence[Shard]) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.matrix = stored_matrix(linear, [shard.size for shard in self.shards], in_features, placement)

    def stacked(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the shards' sizes]."""
        return self.matrix.linear(x)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, in] -> one [T, shard size] per shard (views of one result)."""
        return torch.split(self.stacked(x), [shard.size for shard in self.shards], dim=-1)


class RowParallelLinear(nn.Module):
    """A projection whose input columns are split: matrix [out, shard size].

    What it returns is this rank's part of a sum over ranks, which `PartialSums` or `TensorParallel.all_reduce` adds;
    `in_parts`: parts of it, perhaps, where there is one rank and `PartialSums` alone reads them.
    """

    def __init__(
        self, linear: TextLinear, out_features: int, placement: Placement, *, shard: Shard, in_parts: bool
    ) -> None:
        super().__init__()
        self.shard = shard
        self.in_parts = in_parts
        self.matrix = stored_matrix(linear, [out_features], shard.size, placement)

    def forward(self, x: Tensor) -> Tensor:
        """[T, shard size] -> [T, out], to be added over ranks, or `StoredMatrix.in_parts`."""
        return self.matrix.in_parts(x) if self.in_parts else self.matrix.linear(x)

    def apart(self, x: Tensor) -> tuple[Tensor, RowTerm | None]:
        """The same but for the term of adapters, and that, for whoever norms the sum: `StoredMatrix.apart`."""
        return self.matrix.apart(x, Read.NORMED, split=self.in_parts)


class ReplicatedLinear(nn.Module):
    """A small projection that every rank holds whole."""

    def __init__(self, linear: TextLinear, in_features: int, out_features: int, placement: Placement) -> None:
        super().__init__()
        self.matrix = stored_matrix(linear, [out_features], in_features, placement)

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x)

    def apart(self, x: Tensor, read: Read) -> tuple[Tensor, RowTerm | None]:
        """The same but for the term of adapters, and that: `StoredMatrix.apart`."""
        return self.matrix.apart(x, read)
