"""How large the terms of an adapter are beside the products that they are added to, measured in one step.

It is of few rows of the adapter, which the host knows, and of what the step computes anyway: A x is there, and B times
that is multiplied once more. No row's bits change, no kernel is compiled for it, and nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS
from modelserve_worker.batch import Int32Array
from modelserve_worker.kernels.adapters.terms import SlotFactors, row_blocks

_ROWS = 64  # of a step, spread over those of the adapter
_EXPERT_ROWS = 8  # of these, each of several experts, whose factors are copied


def rows_to_measure(slot: int, row_slots: Int32Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of a step whose rows have the adapters `row_slots` int32 [T]: rows of one, where they stand in its blocks, and
    they themselves."""
    rows, block_slots = row_blocks(row_slots)
    places = np.flatnonzero((np.repeat(block_slots, BLOCK_ROWS) == slot) & (rows >= 0))
    chosen = places[np.linspace(0, len(places) - 1, min(_ROWS, len(places))).astype(np.int64)]
    return chosen, rows[chosen].astype(np.int64)


class StrengthRecorder:
    """Of one slot in a step, over its `rows` int64 [R], which stand in its blocks at `places`. `squares`: of each
    matrix, by the id of its SlotFactors, float64 [parts, 2] of the term and of the product; empty where the step was
    replayed."""

    def __init__(self, slot: int, places: Tensor, rows: Tensor) -> None:
        self._slot, self._places, self._rows = slot, places, rows
        self._routed: tuple[Tensor, Tensor] | None = None
        self.squares: dict[int, Tensor] = {}

    def note(self, factors: SlotFactors, sums: Tensor, product: Tensor) -> None:
        """Of a matrix: what `AdapterTerms.shrink` came to, and the product [T, outputs], or [P, T, outputs] whose sum
        it is, before the term is added."""
        parts, rank = len(factors.parts), factors.rank
        shrunk = sums[:, self._places].sum(0).view(-1, parts, rank) * factors.scales[self._slot, :parts, None]
        shrunk, b = shrunk.to(factors.b.dtype), torch.split(factors.b[self._slot], list(factors.parts))
        whole = product[self._rows] if product.dim() == 2 else product[:, self._rows].sum(0)
        terms = [shrunk[:, part] @ b[part].T for part in range(parts)]
        self._keep(factors, terms, torch.split(whole, list(factors.parts), dim=1))

    def routed(self, chosen: Tensor, places: Tensor) -> None:
        """Which experts rows chose [T, k] and where they were dealt to, for the next products of experts."""
        self._routed = chosen, places

    def note_experts(self, factors: SlotFactors, sums: Tensor, product: Tensor) -> None:
        """Likewise of the matrices of experts, over dealt rows."""
        assert self._routed is not None, "rows are dealt out first"
        rows = self._rows[:: max(1, len(self._rows) // _EXPERT_ROWS)][:_EXPERT_ROWS]
        experts, dealt = (each[rows].flatten().long() for each in self._routed)
        parts, rank = len(factors.parts), factors.rank
        shrunk = sums[:, dealt].sum(0).view(-1, parts, rank) * factors.scales[self._slot, experts][..., None]
        b = factors.b[self._slot, experts].view(len(dealt), parts, -1, rank)
        terms = (b @ shrunk.to(b.dtype)[..., None])[..., 0]  # [dealt rows, parts, outputs]
        self._keep(factors, terms.unbind(1), product[dealt].view(terms.shape).unbind(1))

    def _keep(self, factors: SlotFactors, terms: Sequence[Tensor], products: Sequence[Tensor]) -> None:
        self.squares[id(factors)] = torch.stack(
            [torch.stack([each.double().square().sum() for each in pair]) for pair in zip(terms, products, strict=True)]
        )
