"""y += s B A x of each row's own adapter (Hu et al. 2021), in plain PyTorch: a CPU's, and the kernels' reference.

Rows of one adapter are multiplied together, in blocks of BLOCK_ROWS: requests of one adapter need not lie side by side.
"""

from __future__ import annotations

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
    float32 [slots, P]. Row o of part p is increased by scales[slot, p] * b[slot, o] . (a[slot, p * r : (p + 1) * r] x).
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    parts: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class AdapterTerms(Protocol):
    def add(self, x: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        """Increase y [T, outputs], in the compute dtype or float32, in place; x [T, inputs] in the compute dtype. Rows
        in no block stay as they are. Rows of x and y may lie apart."""
        ...


class PlainTerms:
    """On any device; sums in float32. `exact`: row by row, so that a row's bits do not depend on those beside it."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    def add(self, x: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
        rows, slots = blocks.rows.view(-1, BLOCK_ROWS), blocks.slots
        for slot in sorted(set(slots.tolist())):
            if slot == NO_ADAPTER:
                continue
            of_slot = rows[slots == slot].flatten()
            of_slot = of_slot[of_slot >= 0].long()
            for chosen in torch.split(of_slot, 1) if self._exact else (of_slot,):
                y[chosen] = (y[chosen].float() + self._term(x[chosen].float(), factors, slot)).to(y.dtype)

    def _term(self, x: Tensor, factors: SlotFactors, slot: int) -> Tensor:
        """float32 [R, outputs] of x float32 [R, inputs]."""
        shrunk = x @ factors.a[slot].float().T
        ends = np.cumsum(factors.parts).tolist()
        terms = []
        for part, (end, outputs) in enumerate(zip(ends, factors.parts, strict=True)):
            mine = shrunk[:, part * factors.rank : (part + 1) * factors.rank] * factors.scales[slot, part]
            terms.append(mine @ factors.b[slot, end - outputs : end].float().T)
        return torch.cat(terms, dim=1)


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
