"""The tensor-parallel group as layers see it: which share of a dimension this rank holds, and two collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from modelserve.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Shard:
    """Indices [start, stop) of a dimension of `total` that one rank holds."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Shard:
        """The same share when each index stands for `factor` rows (heads -> rows of a projection)."""
        return Shard(self.start * factor, self.stop * factor, self.total * factor)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`. With size 1 the collectives return their input and no process group is needed."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def shard(self, total: int, *, what: str) -> Shard:
        """Equal contiguous share of `total`. Raises InvalidInput when `size` does not divide it."""
        if total % self.size:
            raise InvalidInput(
                f"tensor parallel size {self.size} does not divide {what} {total}: choose a divisor of {total}",
                field="tensorParallelSize",
            )
        share = total // self.size
        return Shard(self.rank * share, (self.rank + 1) * share, total)

    def kv_shard(self, query_heads: int, kv_heads: int) -> Shard:
        """KV heads that this rank's query heads read; once `size` exceeds their number, ranks share one head.

        Raises InvalidInput when the heads cannot be dealt out evenly.
        """
        queries = self.shard(query_heads, what="num_attention_heads")
        if kv_heads % self.size and self.size % kv_heads:
            raise InvalidInput(
                f"tensor parallel size {self.size} neither divides nor is a multiple of the {kv_heads} KV heads: "
                "choose a power of two",
                field="tensorParallelSize",
            )
        first = queries.start // (query_heads // kv_heads)
        return Shard(first, first + max(1, kv_heads // self.size), kv_heads)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where there is more than one."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks: [N, n] -> [N, n * size], in rank order."""
        if self.size == 1:
            return x
        shares = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(shares.flatten(0, 1), x.contiguous(), group=self.group)
        return torch.cat(shares.unbind(0), dim=-1)
