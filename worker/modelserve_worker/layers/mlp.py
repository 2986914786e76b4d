"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from modelserve.model.weight_format import TextLinear
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.placement import Placement


class GatedMLP(nn.Module):
    """W_down(gelu(W_gate x) * W_up x), to be added over ranks; gate and up are one matrix, in that order.

    `down_in_parts`: of one rank, whose reader takes parts of a sum (`RowParallelLinear`), and a term by itself.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, placement: Placement, *, down_in_parts: bool) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        shard = placement.parallel.shard(intermediate_size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(TextLinear.GATE_UP, hidden_size, placement, shards=(shard, shard))
        self._apart = down_in_parts
        self.down = RowParallelLinear(TextLinear.DOWN, hidden_size, placement, shard=shard, in_parts=down_in_parts)

    def forward(self, x: Tensor) -> tuple[Tensor, RowTerm | None]:
        """x [T, H] -> [T, H], and a term of adapters that is still to be added to it, `StoredMatrix.apart`."""
        inner = self.gate_up.matrix.gated(x, self.elementwise)
        return self.down.apart(inner) if self._apart else (self.down(inner), None)
