"""y += s B A x of each row's own adapter (Hu et al. 2021), in plain PyTorch: a CPU's, and the kernels' reference.

Rows of one adapter are multiplied together, in blocks of BLOCK_ROWS: requests of one adapter need not lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS

NO_ADAPTER = -1


class AdapterBlocks(NamedTuple):
    """B blocks of rows of a step, each of one adapter, and padding."""

    rows: Tensor  # int32 [B * BLOCK_ROWS] rows of the step; -1: padding
    slots: Tensor  # int32 [B]; NO_ADAPTER: the whole block is padding


@dataclass(frozen=True)
class SlotFactors:
    """Factors of a matrix [sum of `parts`, inputs] in every slot, of P parts and rank r: padded with zeros.

    a [slots, P * r, inputs] and b [slots, sum of parts, r] in the compute dtype, views whose slots lie apart; scales
    float32 [slots, P]; of experts each with a dimension behind the slots.
    Row o of part p is increased by scales[slot, p] * b[slot, o] . (a[slot, p * r : (p + 1) * r] x).
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    parts: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[-1]


class AdapterTerms(Protocol):
    def shrink(self, x: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> Tensor:
        """A x of x [T, inputs] in the compute dtype, whose rows may lie apart: float32 [splits, rows of the blocks,
        P * r], whose sum over the splits it is. Rows of padding may hold anything."""
        ...

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        """Increase y [T, outputs], in the compute dtype or float32, in place by the scaled B times what `shrink` came
        to. Rows in no block stay as they are; rows may lie apart."""
        ...


class PlainTerms:
    """On any device; sums in float32. `exact`: row by row, so that a row's bits do not depend on those beside it."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    def shrink(self, x: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> Tensor:
        sums = torch.zeros((1, len(blocks.rows), factors.a.shape[1]), device=x.device)
        for slot, of_blocks, rows in self._rows(blocks):
            sums[0, of_blocks] = x[rows].float() @ factors.a[slot].float().T
        return sums

    def expand(self, sums: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        ends, rank = np.cumsum(factors.parts).tolist(), factors.rank
        for slot, of_blocks, rows in self._rows(blocks):
            terms = []
            for part, (end, outputs) in enumerate(zip(ends, factors.parts, strict=True)):
                shrunk = sums[0, of_blocks, part * rank : (part + 1) * rank] * factors.scales[slot, part]
                terms.append(shrunk @ factors.b[slot, end - outputs : end].float().T)
            y[rows] = (y[rows].float() + torch.cat(terms, dim=1)).to(y.dtype)

    def _rows(self, blocks: AdapterBlocks) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Slot, places in the blocks and rows of the step of what is multiplied together."""
        of_rows = blocks.slots.repeat_interleave(BLOCK_ROWS)
        for slot in sorted(set(blocks.slots.tolist()) - {NO_ADAPTER}):
            places = torch.nonzero((of_rows == slot) & (blocks.rows >= 0))[:, 0]
            for chosen in torch.split(places, 1) if self._exact else (places,):
                yield slot, chosen, blocks.rows[chosen].long()


def row_blocks(row_slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Columns of AdapterBlocks on the host, of the slot of each row [T], NO_ADAPTER where it has none: rows
    [B * BLOCK_ROWS] and slots [B], adapter by adapter."""
    rows = np.flatnonzero(row_slots != NO_ADAPTER).astype(np.int32)
    rows = rows[np.argsort(row_slots[rows], kind="stable")]
    slots, counts = np.unique(row_slots[rows], return_counts=True)
    blocks = -(-counts // BLOCK_ROWS)
    firsts = BLOCK_ROWS * (np.cumsum(blocks) - blocks) - (np.cumsum(counts) - counts)
    padded = np.full(BLOCK_ROWS * int(blocks.sum()), -1, dtype=np.int32)
    padded[np.arange(len(rows)) + np.repeat(firsts, counts)] = rows
    return padded, np.repeat(slots, blocks).astype(np.int32)
