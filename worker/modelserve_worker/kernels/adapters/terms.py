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
    row_slots: Tensor  # int32 [T], of each row of the step; NO_ADAPTER: it has none


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


class FewRows(NamedTuple):
    """Of few rows, what A x is going to be made of."""

    x: Tensor  # [T, inputs]
    sums: Tensor  # memory for it, that nothing has which the product's kernel takes


class RowTerm(NamedTuple):
    """The term of few rows, of which A x is made: for whoever reads the product that it is to be added to."""

    sums: Tensor  # float32 [splits, T, P * r], whose sum over the splits A x is; of rows without adapter anything
    factors: SlotFactors
    row_slots: Tensor  # int32 [T]

    def dense(self) -> Tensor:
        """float32 [T, outputs], in plain PyTorch."""
        factors, rank = self.factors, self.factors.rank
        result = torch.zeros(len(self.row_slots), sum(factors.parts), device=self.sums.device)
        for row, slot in enumerate(self.row_slots.tolist()):
            if slot != NO_ADAPTER:
                shrunk = torch.split(self.sums[:, row].sum(0), rank)
                parts = zip(
                    torch.split(factors.b[slot].float(), list(factors.parts)), shrunk, factors.scales[slot], strict=True
                )
                result[row] = torch.cat([b @ (scale * a) for b, a, scale in parts])
        return result


class AdapterTerms(Protocol):
    def few(self, x: Tensor, factors: SlotFactors) -> FewRows | None:
        """Of x [T, inputs] in the compute dtype, before the product; None: so many rows are sooner done by `shrink` and
        `expand`."""
        ...

    def shrink_few(self, few: FewRows, factors: SlotFactors, blocks: AdapterBlocks, *, settled: bool) -> RowTerm:
        """A x, after the product. `settled`: its kernel settles (`dependent_launch`)."""
        ...

    def left_to_readers(self, factors: SlotFactors, *, normed: bool) -> bool:
        """Whether the kernel that reads a product takes the `RowTerm`; `normed`: one that norms whole rows of it."""
        ...

    def expand_few(self, term: RowTerm, y: Tensor) -> None:
        """Increase y [T, outputs], in the compute dtype or float32, in place by the term."""
        ...

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

    def few(self, _x: Tensor, _factors: SlotFactors) -> FewRows | None:
        return None

    def shrink_few(self, few: FewRows, factors: SlotFactors, blocks: AdapterBlocks, *, settled: bool) -> RowTerm:
        del settled  # one operation after the other
        few.sums.zero_()
        for slot, _, rows in self._rows(blocks):
            few.sums[0, rows] = few.x[rows].float() @ factors.a[slot].float().T
        return RowTerm(few.sums, factors, blocks.row_slots)

    def left_to_readers(self, factors: SlotFactors, *, normed: bool) -> bool:
        del factors, normed  # plain readers take any
        return True

    def expand_few(self, term: RowTerm, y: Tensor) -> None:
        y.copy_(y.float() + term.dense())

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
                scaled = sums[0, of_blocks, part * rank : (part + 1) * rank] * factors.scales[slot, part]
                terms.append(scaled @ factors.b[slot, end - outputs : end].float().T)
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
