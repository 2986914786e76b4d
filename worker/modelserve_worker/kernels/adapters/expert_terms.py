"""y += s B A x of each row's own adapter and expert, in plain PyTorch: a CPU's, and the kernels' reference.

Rows are those that `ExpertBackend.deal` has dealt out, one for each expert that a row of the step chose. Which have an
adapter is known when experts are chosen, layer by layer and on the device alone: blocks are as many as there can be at
most, and nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS
from modelserve_worker.kernels.adapters.terms import NO_ADAPTER, AdapterBlocks, SlotFactors


class ExpertBlocks(NamedTuple):
    """B blocks of dealt rows, each of one adapter and one expert, and padding."""

    rows: Tensor  # int32 [B * BLOCK_ROWS] dealt rows; -1: padding
    slots: Tensor  # int32 [B]; NO_ADAPTER: the whole block is padding
    experts: Tensor  # int32 [B]; undefined in padding


class ExpertTerms(Protocol):
    """`SlotFactors` of experts have a dimension more: a [slots, E, P * r, inputs], b [slots, E, sum of parts, r] and
    scales [slots, E, P], with parts of one size."""

    def blocks(self, rows: AdapterBlocks, chosen: Tensor, places: Tensor, factors: SlotFactors) -> ExpertBlocks:
        """Of the experts int32 [T, k] that each row of a step chose, or NO_EXPERT, and their dealt rows `places` int32
        [T, k]; `rows` are the step's that have adapters."""
        ...

    def shrink(self, x: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> Tensor:
        """A x of dealt rows x [T k, inputs] in the compute dtype: float32 [splits, T k, P * r], whose sum over the
        splits it is. Rows in no block may hold anything."""
        ...

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> None:
        """Increase y [T k, outputs], in the compute dtype, in place by the scaled B times what `shrink` came to. Rows
        in no block stay as they are."""
        ...


class PlainExpertTerms:
    """On any device; sums in float32. `exact`: row by row, so that a row's bits do not depend on those beside it."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    def blocks(self, rows: AdapterBlocks, chosen: Tensor, places: Tensor, factors: SlotFactors) -> ExpertBlocks:
        experts = factors.a.shape[1]
        of_rows = rows.slots.repeat_interleave(BLOCK_ROWS)
        adapted = torch.nonzero(rows.rows >= 0)[:, 0]
        step_rows = rows.rows[adapted].long()
        keys = (of_rows[adapted, None] * experts + chosen[step_rows]).flatten()
        taken = torch.nonzero((chosen[step_rows] < experts).flatten())[:, 0]
        taken = taken[keys[taken].argsort(stable=True)]
        keys, dealt = keys[taken], places[step_rows].flatten()[taken]
        found, counts = torch.unique(keys, return_counts=True)  # rising, as the keys are
        of_each = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
        firsts = BLOCK_ROWS * (of_each.cumsum(0) - of_each) - (counts.cumsum(0) - counts)
        padded = torch.full((BLOCK_ROWS * int(of_each.sum()),), -1, dtype=torch.int32, device=dealt.device)
        padded[torch.arange(len(dealt), device=dealt.device) + firsts.repeat_interleave(counts)] = dealt
        of_blocks = found.repeat_interleave(of_each)
        return ExpertBlocks(padded, (of_blocks // experts).int(), (of_blocks % experts).int())

    def shrink(self, x: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> Tensor:
        sums = torch.zeros((1, len(x), factors.a.shape[2]), device=x.device)
        for slot, expert, rows in self._rows(blocks):
            sums[0, rows] = x[rows].float() @ factors.a[slot, expert].float().T
        return sums

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: ExpertBlocks) -> None:
        parts, rank = len(factors.parts), factors.rank
        for slot, expert, rows in self._rows(blocks):
            shrunk = sums[0, rows].view(len(rows), parts, rank) * factors.scales[slot, expert, :, None]
            b = factors.b[slot, expert].float().view(parts, -1, rank)
            terms = [shrunk[:, part] @ b[part].T for part in range(parts)]
            y[rows] = (y[rows].float() + torch.cat(terms, dim=1)).to(y.dtype)

    def _rows(self, blocks: ExpertBlocks) -> Iterator[tuple[int, int, Tensor]]:
        """Slot, expert and dealt rows of what is multiplied together."""
        dealt = blocks.rows.view(-1, BLOCK_ROWS)
        for block, (slot, expert) in enumerate(zip(blocks.slots.tolist(), blocks.experts.tolist(), strict=True)):
            if slot == NO_ADAPTER:
                continue
            rows = dealt[block][dealt[block] >= 0].long()
            for chosen in torch.split(rows, 1) if self._exact else (rows,):
                yield slot, expert, chosen
