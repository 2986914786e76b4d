"""Which rows of the step at work have adapters, for the layers that add their terms; and the term of one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from modelserve_worker.kernels.adapters.expert_terms import ExpertBlocks, ExpertTerms
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, AdapterTerms, FewRows, RowTerm, SlotFactors
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.adapter_strengths import StrengthRecorder


class AdapterRows:
    """One of a model. `current`: those of the rows that products get now; None: no row has an adapter, and products
    are as if there were none. `recorders`: what measures the step at work, of which rows that are narrowed no more."""

    def __init__(self) -> None:
        self.current: AdapterBlocks | None = None
        self.recorders: tuple[StrengthRecorder, ...] = ()
        self._narrowed: AdapterBlocks | None = None

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.current = step.adapters
        self._narrowed = None if step.narrowed is None else step.narrowed.adapters

    def narrow(self) -> None:
        """From here on there are the narrowed step's rows alone."""
        self.current, self.recorders = self._narrowed, ()


class Read(Enum):
    """By whom a product is read that takes its term, too."""

    BY_ELEMENT = "by element"
    NORMED = "normed"


@dataclass(frozen=True)
class MatrixTerm:
    """What adapters add to products by one matrix."""

    factors: SlotFactors
    rows: AdapterRows
    backend: AdapterTerms

    @property
    def active(self) -> bool:
        """Whether a row of the step at work has an adapter."""
        return self.rows.current is not None

    def started(self, x: Tensor) -> Tensor | FewRows | None:
        """Of x [T, inputs] what `finished` takes, before the product; None: no row has an adapter."""
        blocks = self.rows.current
        if blocks is None or not x.shape[0]:
            return None
        few = None if self.rows.recorders else self.backend.few(x, self.factors)  # these read A x
        return self.backend.shrink(x, self.factors, blocks) if few is None else few

    def finished(
        self, started: Tensor | FewRows, product: Tensor, read: Read | None, *, settled: bool
    ) -> tuple[Tensor, RowTerm | None]:
        """`product` [T, outputs], or [P, T, outputs] whose sum it is, increased in place, and None; or as it is, and
        its term, where whoever reads it takes that. `settled`: the product's kernel settles."""
        assert self.rows.current is not None
        whole = product if product.dim() == 2 else product[0]
        if isinstance(started, FewRows):
            term = self.backend.shrink_few(started, self.factors, self.rows.current, settled=settled)
            if read is not None and self.backend.left_to_readers(self.factors, normed=read is Read.NORMED):
                return product, term
            self.backend.expand_few(term, whole)
            return product, None
        for recorder in self.rows.recorders:
            recorder.note(self.factors, started, product)
        self.backend.expand(started, whole, self.factors, self.rows.current)
        return product, None


@dataclass(frozen=True)
class ExpertTerm:
    """What adapters add to products by the matrices of a layer's experts."""

    factors: SlotFactors
    rows: AdapterRows
    backend: ExpertTerms

    def blocks(self, chosen: Tensor, places: Tensor) -> ExpertBlocks | None:
        """Those of all terms of the layer, `ExpertTerms.blocks`; None: no row of the step at work has an adapter."""
        rows = self.rows.current
        if rows is None or not len(chosen):
            return None
        for recorder in self.rows.recorders:
            recorder.routed(chosen, places)
        return self.backend.blocks(rows, chosen, places, self.factors)

    def shrunk(self, x: Tensor, blocks: ExpertBlocks) -> Tensor:
        """Of dealt rows x what `added` takes."""
        return self.backend.shrink(x, self.factors, blocks)

    def added(self, sums: Tensor, product: Tensor, blocks: ExpertBlocks) -> Tensor:
        """`product`, increased in place."""
        for recorder in self.rows.recorders:
            recorder.note_experts(self.factors, sums, product)
        self.backend.expand(sums, product, self.factors, blocks)
        return product
