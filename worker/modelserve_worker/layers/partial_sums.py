"""Where what row-parallel products leave partial is added over ranks, together with the norm that follows the sum."""

from __future__ import annotations

from torch import Tensor

from modelserve_worker.kernels.elementwise import ElementwiseDoors
from modelserve_worker.layers.parallel import TensorParallel


class PartialSums:
    """The door `residual_norm` for deltas that are to be added over ranks first."""

    def __init__(self, parallel: TensorParallel, doors: ElementwiseDoors) -> None:
        self._parallel = parallel
        self._doors = doors

    def residual_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        delta_weight: Tensor,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        """`ElementwiseDoors.residual_norm` of the sum of `delta` [T, H] over ranks: one launch where peers sum it.

        Where they sum by rows, the residual is right in this rank's rows alone and the normed rows last until the next
        call: both are for the sums and products of a layer, and for nobody else.
        """
        peers = self._parallel.peers
        if peers is not None and peers.takes_rows(delta):
            return peers.residual_norm(residual, delta, delta_weight, scalar=scalar, next_weight=next_weight, eps=eps)
        by_rows = self._parallel.peer_rows
        if by_rows is not None and next_weight is not None and by_rows.takes(delta):
            return by_rows.residual_norm(residual, delta, delta_weight, scalar=scalar, next_weight=next_weight, eps=eps)
        return self._doors.residual_norm(
            residual, self._parallel.all_reduce(delta), delta_weight, scalar=scalar, next_weight=next_weight, eps=eps
        )
