"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelserve.weight_format import TextLinear, WeightFormat
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.parallel import TensorParallel


class GatedMLP(nn.Module):
    """W_down(gelu(W_gate x) * W_up x), to be added over ranks; gate and up are one matrix, in that order."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        operations: Operations,
        parallel: TensorParallel,
        down_in_parts: bool,
        weight_format: WeightFormat | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.doors = operations.elementwise
        shard = parallel.shard(intermediate_size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(
            TextLinear.GATE_UP,
            hidden_size,
            shards=(shard, shard),
            weight_format=weight_format,
            operations=operations,
            device=device,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            TextLinear.DOWN,
            hidden_size,
            shard=shard,
            in_parts=down_in_parts,
            weight_format=weight_format,
            operations=operations,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.gate_up.matrix.gated(x, self.doors))
        return result
