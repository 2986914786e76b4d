"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.parallel import TensorParallel


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of GELU."""
    return functional.gelu(gate, approximate="tanh") * up


class GatedMLP(nn.Module):
    """W_down(gelu(W_gate x) * W_up x); gate and up are one matrix, in that order."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        shard = parallel.shard(intermediate_size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(hidden_size, shards=(shard, shard), device=device, dtype=dtype)
        self.down = RowParallelLinear(hidden_size, shard=shard, parallel=parallel, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        result: Tensor = self.down(gated_gelu(gate, up))
        return result
