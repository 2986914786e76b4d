"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from modelserve.model.weight_format import TextLinear
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.placement import Placement


class GatedMLP(nn.Module):
    """W_down(gelu(W_gate x) * W_up x), to be added over ranks; gate and up are one matrix, in that order."""

    def __init__(self, hidden_size: int, intermediate_size: int, placement: Placement, *, down_in_parts: bool) -> None:
        super().__init__()
        self.elementwise = placement.operations.elementwise
        shard = placement.parallel.shard(intermediate_size, what="intermediate_size")
        self.gate_up = ColumnParallelLinear(TextLinear.GATE_UP, hidden_size, placement, shards=(shard, shard))
        self.down = RowParallelLinear(TextLinear.DOWN, hidden_size, placement, shard=shard, in_parts=down_in_parts)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.gate_up.matrix.gated(x, self.elementwise))
        return result

    def apart(self, x: Tensor) -> tuple[Tensor, RowTerm | None]:
        """The same, and the term of adapters of the last product: `StoredMatrix.apart`. One rank's."""
        return self.down.apart(self.gate_up.matrix.gated(x, self.elementwise))
