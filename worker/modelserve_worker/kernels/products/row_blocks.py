"""PyTorch's products, on a CPU in blocks of few sizes.

For each count of rows that PyTorch meets on a CPU in bfloat16 it makes kernels of half a megabyte, for every shape of
matrix, and keeps them for good: a server that is asked for all counts would grow by gigabytes. Rows are multiplied in
blocks of seven sizes instead, whatever a step holds. In them a row has the same bits wherever it stands and whoever is
beside it; below four rows PyTorch adds in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor
from torch.nn import functional

LEAST_ROWS, MOST_ROWS = 4, 256  # more at a time are no faster
_ROWS_OF_A_PRODUCT = 24  # that take as long as reading the matrix once more, roughly


class ElementProducts(Protocol):
    """Products by the elements of matrices, in the compute dtype of the rows."""

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] times the transposed weight [N, K] -> [T, N]."""
        ...

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Rows [ends[e - 1], ends[e]) of x [R, K] by weights[e] of [E, N, K] -> [R, N]. ends int32 [E]; rows from the
        last end on are undefined."""
        ...


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times the transposed weight [N, K] -> [T, N], by PyTorch."""
    if x.device.type != "cpu":
        return functional.linear(x, weight)
    product = x.new_empty(x.shape[0], weight.shape[0])
    for start, rows in _blocks(x.shape[0]):
        block = x[start : start + rows]
        if missing := rows - block.shape[0]:
            block = functional.pad(block, (0, 0, 0, missing))
        product[start : start + rows] = functional.linear(block, weight)[: rows - missing]
    return product


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [ends[e - 1], ends[e]) of x [R, K] times the transpose of weights[e], of [E, N, K] -> [R, N].

    ends int32 [E], on the device. Rows from the last end on are undefined.
    """
    if x.device.type != "cpu":
        return functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    product, start = x.new_empty(x.shape[0], weights.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            product[start:end] = plain_product(x[start:end], weights[expert])
            start = end
    return product


class PlainProducts:
    """By PyTorch."""

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        return plain_product(x, weight)

    def grouped(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return grouped_product(x, weights, ends)


PLAIN_PRODUCTS = PlainProducts()


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Start and size of each block, powers of two; the last may reach past `rows`."""
    start = 0
    while (left := rows - start) > 0:
        size = min(MOST_ROWS, max(LEAST_ROWS, 1 << (left - 1).bit_length()))
        if size - left > _ROWS_OF_A_PRODUCT:
            size //= 2
        yield start, size
        start += size
