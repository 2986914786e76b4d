"""Operations of which a test has chosen some: kernels in Triton's interpreter, or doubles of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.table import NO_ENDS, Backend, Choice, Ends, KernelTable, Operation, Subject
from modelserve_worker.kernels.operations import NO_KERNELS, MatrixProducts, Operations, Product

CPU = torch.device("cpu")


def product(multiply: Callable[..., Tensor] | None, *, most_rows: int | None = None, fuses: bool = False) -> Product:
    """`multiply` None: PyTorch's by the matrix's elements."""
    backend = Backend.PLAIN if multiply is None else Backend.TRITON
    ends = Ends(gated=True, split=True) if fuses else NO_ENDS
    return Product(Choice(Operation.LINEAR, backend, ("chosen",), most_rows=most_rows, ends=ends), multiply)


class ChosenOperations(Operations):
    """Plain PyTorch's, but for backends that are given by name, and for products and grouped products by format."""

    def __init__(
        self,
        *,
        table: KernelTable = NO_KERNELS,
        products: dict[StoredType, tuple[Product, ...]] | None = None,
        grouped: dict[StoredType, tuple[Product, ...]] | None = None,
        **backends: Any,
    ) -> None:
        super().__init__(table, CPU)
        self.__dict__.update(backends)
        self._chosen, self._chosen_grouped = products or {}, grouped or {}

    def products(
        self, _subject: Subject, _shape: tuple[int, int], stored: StoredType, *, grouped: bool = False
    ) -> MatrixProducts:
        return MatrixProducts((self._chosen_grouped if grouped else self._chosen).get(stored, ()))

    def _in_triton(self, operation: Operation) -> bool:
        return bool(self.table.choices) and super()._in_triton(operation)
