"""Elementwise and row-wise arithmetic of the decoder: its interface, and the reference in plain PyTorch.

Rounding is part of the contract, and is the reference implementation's: a norm is computed in float32, multiplied by
its weight and rounded once; a sum, a product with a scalar and an activation are rounded each.

RMS_w(x) = w * x / sqrt(mean(x^2) + eps) over the last dimension. gelu is the tanh form. Norm weights have the dtype of
what they norm. Results are new tensors unless an operation says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from modelserve_worker.kernels.adapters.terms import RowTerm


class ElementwiseBackend(Protocol):
    """The decoder's elementwise operations on one kind of device. T is the number of rows (tokens)."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """RMS_w(x) for x [..., D] and weight [D]; result in the dtype of x."""
        ...

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
        """Add a block's output to the residual, and norm the sum for the block that comes next.

        residual' = (residual + RMS_delta_weight(delta)) * scalar, normed = RMS_next_weight(residual').
        residual and delta are contiguous [T, H], the weights [H], scalar [1]; a scalar of None is 1. A delta may be
        float32 [P, T, H]: its sum over P, rounded once (`StoredMatrix.in_parts`). A term of adapters
        (`StoredMatrix.apart`) is added to it before it is rounded. Returns residual' and normed, or None
        where there is no next_weight. The caller gives `residual` up: residual' may be the same memory, or not.
        """
        ...

    def gated_gelu(self, gate_up: Tensor, term: RowTerm | None = None) -> Tensor:
        """gelu(gate) * up for contiguous rows [T, 2 I] that hold the gate first -> [T, I]; a term of
        adapters is added to them first, and the sum rounded."""
        ...

    def per_layer_gate(self, gate: Tensor, per_layer: Tensor, term: RowTerm | None = None) -> Tensor:
        """gelu(gate) * per_layer, both [T, P] -> [T, P]. Rows are contiguous; those of either may lie apart. A term of
        adapters is added to the gate first, and the sum rounded."""
        ...

    def per_layer_inputs(
        self, projected: Tensor, table_rows: Tensor, weight: Tensor, *, projection_scale: float, eps: float
    ) -> Tensor:
        """(RMS_w(projected * projection_scale) + table_rows) / sqrt(2), normed over each layer's P = len(weight).

        projected and table_rows [T, L * P], contiguous -> [T, L, P].
        """
        ...

    def embed(self, ids: Tensor, table: Tensor, *, scale: float) -> Tensor:
        """table[ids] * scale for ids int32 or int64 [T] and table [V, H] -> [T, H].

        An id outside the table gives a row of zeros: rows that only pad a step may hold any id.
        """
        ...


def rms_normalize(x: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32. Returns float32 of x's shape."""
    x = x.float()
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)


class PlainElementwise:
    """The operations in plain PyTorch, on any device: what the kernels are compared with, and what a CPU runs."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return (rms_normalize(x, eps=eps) * weight.float()).to(x.dtype)

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
        if delta.dim() > residual.dim():
            delta = delta.sum(0)
        delta = _added(delta, term).to(residual.dtype)
        summed = residual + self.rms_norm(delta, delta_weight, eps=eps)
        if scalar is not None:
            summed = summed * scalar
        return summed, None if next_weight is None else self.rms_norm(summed, next_weight, eps=eps)

    def gated_gelu(self, gate_up: Tensor, term: RowTerm | None = None) -> Tensor:
        gate, up = _added(gate_up, term).chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def per_layer_gate(self, gate: Tensor, per_layer: Tensor, term: RowTerm | None = None) -> Tensor:
        return functional.gelu(_added(gate, term), approximate="tanh") * per_layer

    def per_layer_inputs(
        self, projected: Tensor, table_rows: Tensor, weight: Tensor, *, projection_scale: float, eps: float
    ) -> Tensor:
        shape = (projected.shape[0], -1, weight.shape[0])
        context = self.rms_norm((projected * projection_scale).view(shape), weight, eps=eps)
        added: Tensor = (context + table_rows.view(shape)) * 2.0**-0.5
        return added

    def embed(self, ids: Tensor, table: Tensor, *, scale: float) -> Tensor:
        inside = (ids >= 0) & (ids < table.shape[0])
        return functional.embedding(ids * inside, table) * scale * inside.unsqueeze(-1)


class ExactElementwise(PlainElementwise):
    """With the same bits for a row whatever rows lie beside it: PyTorch computes a tensor's last numbers, and on
    several threads those of each share, by another tanh than the others, so GELU goes row by row."""

    def gated_gelu(self, gate_up: Tensor, term: RowTerm | None = None) -> Tensor:
        return _row_by_row(super().gated_gelu, _added(gate_up, term))

    def per_layer_gate(self, gate: Tensor, per_layer: Tensor, term: RowTerm | None = None) -> Tensor:
        return _row_by_row(super().per_layer_gate, _added(gate, term), per_layer)


def _added(product: Tensor, term: RowTerm | None) -> Tensor:
    """Their sum, rounded once to the product's dtype."""
    return product if term is None else (product.float() + term.dense()).to(product.dtype)


def _row_by_row(operation: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    rows = zip(*(torch.split(column.contiguous(), 1) for column in columns), strict=True)
    return torch.cat([operation(*row) for row in rows])
