"""A matrix of a linear layer as the checkpoint stores it, and the one product that layers ask of it.

Parameters have the checkpoint's own layout, so that a loader copies bytes. `loaded` follows the last byte: what a
format turns once it turns there, matrix by matrix: words of other tools' order, and scales of a whole matrix, which
become its rows'. Where kernels multiply by it, it takes the order of theirs (`repack`;
`modelserve.sizing.weights.quantised_tiles` counts). Elsewhere products are the plain ones: the matrix in the compute
type, made anew each time, then PyTorch's product. Which it is, of how many rows, the table of kernels says
(`Operations.products`). Those matrices share one workspace, since a stream computes one product after the other;
`modelserve.sizing.weights.dequantisation` says its size. Nothing waits for the host and no shape depends on a value, so
a step that multiplies by any of them can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelserve_worker.kernels.adapters.expert_terms import ExpertBlocks
from modelserve_worker.kernels.adapters.terms import FewRows, RowTerm
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend
from modelserve_worker.kernels.operations import MatrixProducts
from modelserve_worker.layers.adapter_rows import ExpertTerm, MatrixTerm, Read


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class StoredMatrix(nn.Module):
    """[rows, columns], or [experts, rows, columns]; several checkpoint matrices may be stacked in the rows."""

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        experts: int,
        dtype: torch.dtype,
        products: MatrixProducts,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rows, self.columns, self.experts = sum(parts), columns, experts
        self.dtype = dtype  # of inputs, results and `dense`
        self.workspace: Tensor | None = None  # uint8, shared with other matrices; without one, scratch is new each time
        self.products = products  # of experts: grouped ones
        self.term: MatrixTerm | None = None  # of adapters; None: there is no room for any
        self.expert_term: ExpertTerm | None = None  # likewise, of experts

    def linear(self, x: Tensor) -> Tensor:
        """x [T, columns] in the compute dtype -> [T, rows]. Not for experts."""
        return self._with_term(x)[0]

    def in_parts(self, x: Tensor) -> Tensor:
        """`linear`, or float32 [P, T, rows] whose sum over P it is before it is rounded."""
        return self._with_term(x, split=True)[0]

    def apart(self, x: Tensor, read: Read, *, split: bool = False) -> tuple[Tensor, RowTerm | None]:
        """`linear`, or `in_parts` where `split`, but for the term of adapters; and that term, for whoever reads both:
        None where there is none, or it is in the product."""
        return self._with_term(x, read, split=split)

    def gated(self, x: Tensor, elementwise: ElementwiseBackend) -> Tensor:
        """gelu(first half of `linear`) * second half, each rounded: [T, columns] -> [T, rows / 2]."""
        product = self.products.of(x.shape[0])
        adapted = self.term is not None and self.term.active  # the term comes before GELU
        if product is not None and product.choice.ends.gated and x.shape[0] and not adapted:
            return self._product(x, gated=True)
        return elementwise.gated_gelu(*self.apart(x, Read.BY_ELEMENT))

    def _with_term(self, x: Tensor, read: Read | None = None, *, split: bool = False) -> tuple[Tensor, RowTerm | None]:
        if self.term is None or (started := self.term.started(x)) is None:
            return self._product(x, split=split), None
        product = self.products.of(x.shape[0])
        beside = product is not None and product.choice.ends.beside and isinstance(started, FewRows)
        multiplied = self._product(x, split=split, beside=beside)
        return self.term.finished(started, multiplied, read, settled=beside)

    def _product(self, x: Tensor, *, gated: bool = False, split: bool = False, beside: bool = False) -> Tensor:
        product = self.products.of(x.shape[0])
        x = self._ordered(x)
        if product is None or product.multiply is None:
            return self.products.elements.dense(self._rounded(x), self.dense())
        if not x.shape[0]:
            return x.new_empty((0, self.rows))
        ends = {"gated": gated, "split": split and product.choice.ends.split, "beside": beside}
        return product.multiply(x, self.held(), **{name: True for name, asked in ends.items() if asked})

    def _ordered(self, x: Tensor) -> Tensor:
        """Inputs in the order of the matrix's columns."""
        return x

    def _rounded(self, x: Tensor) -> Tensor:
        """Inputs as the format's kernels round them."""
        return x

    def held(self) -> object:
        """The parameters as kernels take them."""
        raise NotImplementedError

    @property
    def dequantises(self) -> bool:
        """Whether its products use the workspace."""
        return False

    @property
    def on_kernels(self) -> bool:
        """Whether kernels multiply by it, any number of rows."""
        return self.products.on_kernels

    def grouped(self, x: Tensor, ends: Tensor, adapted: ExpertBlocks | None = None) -> Tensor:
        """Of experts: rows [ends[e - 1], ends[e]) of x [R, columns] by the matrix of expert e -> [R, rows].

        ends int32 [experts]. Rows from the last end on are undefined. `adapted`: rows that have adapters.
        """
        if self.expert_term is None or adapted is None:
            return self._grouped_product(x, ends)
        sums = self.expert_term.shrunk(x, adapted)
        return self.expert_term.added(sums, self._grouped_product(x, ends), adapted)

    def grouped_gated(
        self, x: Tensor, ends: Tensor, elementwise: ElementwiseBackend, adapted: ExpertBlocks | None = None
    ) -> Tensor:
        """gelu(first half of `grouped`) * second half, each rounded: [R, columns] -> [R, rows / 2]."""
        product = self.products.of(x.shape[0])
        has_term = self.expert_term is not None and adapted is not None
        if product is not None and product.choice.ends.gated and not has_term:
            return self._grouped_product(x, ends, gated=True)
        return elementwise.gated_gelu(self.grouped(x, ends, adapted))

    def _grouped_product(self, x: Tensor, ends: Tensor, **fused: bool) -> Tensor:
        product = self.products.of(x.shape[0])
        x = self._ordered(x)
        if product is None or product.multiply is None:
            return self.products.elements.grouped(x, self.dense(), ends)
        return product.multiply(x, self.held(), ends, **fused)

    def dense(self) -> Tensor:
        """The elements in the compute dtype, each rounded once: the parameter where it is that, else scratch, which
        holds until the next product by any matrix of the same workspace. Not after `repack` for kernels."""
        raise NotImplementedError

    def loaded(self) -> None:
        """All parameters are filled: called once, before the first product. Raises ValueError for what cannot be."""
        self.repack()

    def repack(self) -> None:
        """Bring the parameters into the order of the device's kernels, where it has some for them."""

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, start: int = 0) -> Tensor:
        """Memory of the shared workspace from byte `start` on, or new memory where there is none."""
        if self.workspace is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        return self.workspace[start : start + size].view(dtype).view(*shape)

    def _parameter(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, transposed: bool = False
    ) -> nn.Parameter:
        """[rows, columns], of experts likewise behind one another; or [columns, rows]."""
        leading, shape = (self.experts,) if self.experts else (), (columns, rows) if transposed else (rows, columns)
        return frozen(torch.empty((*leading, *shape), dtype=dtype, device=device))


class DenseMatrix(StoredMatrix):
    """Elements in the compute dtype: `weight`."""

    def __init__(self, parts: Sequence[int], columns: int, *, device: torch.device, **stored: Any) -> None:
        super().__init__(parts, columns, **stored)
        self.weight = self._parameter(self.rows, columns, self.dtype, device)

    def dense(self) -> Tensor:
        return self.weight

    def held(self) -> Tensor:
        return self.weight


class QuantisedMatrix(StoredMatrix):
    """Multiplied by kernels, in whose order `repack` brings it, or dequantised for each product."""

    def _by_row(self, scales: Tensor) -> Tensor:
        """Scales [experts or 1, stacked matrices] -> [experts or 1, rows]."""
        parts = enumerate(self.parts)
        return torch.cat([scales[:, i : i + 1].expand(-1, part) for i, part in parts], dim=1)

    @property
    def dequantises(self) -> bool:
        return not self.on_kernels
