"""Where what row-parallel products leave partial is added over ranks, together with the norm that follows the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend
from modelserve_worker.layers.parallel import TensorParallel

if TYPE_CHECKING:
    from modelserve_worker.kernels.peers.peer_rows import PeerRows  # CUDA, on GPUs alone


class PartialSums:
    """Has `residual_norm` for deltas that are to be added over ranks first."""

    def __init__(self, parallel: TensorParallel, backend: ElementwiseBackend) -> None:
        self._parallel = parallel
        self._backend = backend

    def residual_norm(
        self,
        residual: Tensor,
        delta: Tensor,
        delta_weight: Tensor,
        *,
        scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
        term: RowTerm | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`ElementwiseBackend.residual_norm` of the sum of `delta` [T, H] over ranks: one launch where peers sum it.
        A term is one rank's.

        Where they sum by rows, the residual is right in this rank's rows alone and the normed rows last until the next
        call: both are for the sums and products of a layer, and for nobody else.
        """
        peers, by_rows = self._parallel.peers, self._by_rows(delta)
        if peers is not None and peers.takes_rows(delta):
            return peers.residual_norm(residual, delta, delta_weight, scalar=scalar, next_weight=next_weight, eps=eps)
        if by_rows is not None and next_weight is not None:
            return by_rows.residual_norm(residual, delta, delta_weight, scalar=scalar, next_weight=next_weight, eps=eps)
        return self._backend.residual_norm(
            residual, self._parallel.all_reduce(delta), delta_weight, scalar=scalar, next_weight=next_weight, eps=eps,
            term=term,
        )  # fmt: skip

    def rows_of(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Rows [R, H] of the residual [T, H] of a layer, right on every rank."""
        chosen = residual.index_select(0, rows)
        if self._by_rows(residual) is None:
            return chosen
        share = -(-len(residual) // self._parallel.size)
        own = rows // share == self._parallel.rank
        return self._parallel.all_reduce(torch.where(own[:, None], chosen, 0))

    def whole(self, residual: Tensor) -> Tensor:
        """The residual [T, H] of a layer, right in all rows on every rank."""
        if self._by_rows(residual) is None:
            return residual
        rows = torch.arange(len(residual), device=residual.device)
        return self.rows_of(residual, rows)

    def _by_rows(self, delta: Tensor) -> PeerRows | None:
        """Who sums rows like these, if each rank norms and keeps a share of them."""
        peers, by_rows = self._parallel.peers, self._parallel.peer_rows
        if by_rows is None or (peers is not None and peers.takes_rows(delta)) or not by_rows.takes(delta):
            return None
        return by_rows
