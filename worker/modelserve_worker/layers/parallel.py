"""The tensor-parallel group as layers see it: which share of a dimension this rank holds, and its collectives.

Sums over ranks are added in rank order in float32 and rounded once, so that all ranks hold the same bits; NCCL, which
adds large ones, comes to the same bits on all ranks in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from modelserve.errors import InvalidInput

if TYPE_CHECKING:
    from modelserve_worker.kernels.peers.peer_rows import PeerRows  # CUDA, on GPUs alone
    from modelserve_worker.kernels.peers.peer_sums import PeerSums


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
    """Rank `rank` of `size`. With size 1 the collectives return their input and no process group is needed; else they
    go over torch's default group, which is named nowhere else: it ends, with its threads, where it is destroyed.

    On GPUs that reach each other's memory `peers` sums what is small, and `peer_rows` the rows of a layer. `exact`: all
    sums are of gathered parts in rank order, whatever their size.
    """

    rank: int = 0
    size: int = 1
    peers: PeerSums | None = None
    peer_rows: PeerRows | None = None
    exact: bool = False

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
        """Sum over ranks; the result may take the place of x."""
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce(x)
        if x.is_cuda and not self.exact:
            dist.all_reduce(x)
            return x
        return sum_in_rank_order(self._gathered(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks: [N, n] -> [N, n * size], in rank order."""
        if self.size == 1:
            return x
        return torch.cat(self._gathered(x).unbind(0), dim=-1)

    def _gathered(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], in rank order."""
        shares = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(shares.flatten(0, 1), x.contiguous())
        return shares


def sum_in_rank_order(shares: Tensor) -> Tensor:
    """[size, ...] -> [...]: added from rank 0 on in float32, rounded once. The reference of `PeerSums.all_reduce`."""
    total = shares[0].float()
    for share in shares[1:]:
        total += share.float()
    return total.to(shares.dtype)
