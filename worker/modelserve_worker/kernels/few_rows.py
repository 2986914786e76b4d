"""The door of products that have kernels of their own on a device: of few rows, which the speed of memory bounds, of
INT4 with any number of rows, which unpacks on the way, and of experts."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from modelserve_worker.kernels.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.int4_linear import Int4Tiles
from modelserve_worker.kernels.linear_tiles import HOPPER, kernel_capability
from modelserve_worker.kernels.row_blocks import plain_product


class FewRows(Protocol):
    """Products x [T, K] -> [T, N] of one kind of device. `gated`: gelu(first half) * second half of it, [T, N / 2].

    `split`: whoever reads the result adds it up, so it may be float32 [P, T, N] of P parts of the inputs.
    """

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels multiply these rows."""
        ...

    def takes_int4(self, x: Tensor) -> bool:
        """The same where the matrix is INT4."""
        ...

    def dense(self, x: Tensor, weight: Tensor, *, gated: bool = False, split: bool = False) -> Tensor:
        """weight [N, K] in the dtype of x."""
        ...

    def int4(self, x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
        """A symmetric INT4 matrix."""
        ...

    def fp8(self, x: Tensor, matrix: Fp8Pairs, *, gated: bool = False, split: bool = False) -> Tensor:
        """An FP8 matrix with a scale for each row and a multiple of 128 inputs."""
        ...

    def takes_grouped(self, x: Tensor, matrices: Tensor, *, gated: bool = False) -> bool:
        """Whether the kernels multiply rows sorted by expert with these matrices [E, N, K]."""
        ...

    def grouped(self, x: Tensor, matrices: Tensor, ends: Tensor, *, gated: bool = False) -> Tensor:
        """Rows [ends[e - 1], ends[e]) of x [R, K] times matrices[e] -> [R, N]; undefined from the last end on."""
        ...


class HopperRows:
    """`linear_rows_sm90` and, for more rows of INT4, `linear_int4_sm90`: they fetch weights before the kernel ahead of
    them has ended. And `grouped_rows_sm90` for rows of experts."""

    def __init__(self) -> None:
        from modelserve_worker.kernels import grouped_rows_sm90, linear_int4_sm90, linear_rows_sm90  # the GPU's driver

        self.takes = linear_rows_sm90.takes
        self.takes_int4 = linear_rows_sm90.readable
        self.dense = linear_rows_sm90.dense_rows
        self.fp8 = linear_rows_sm90.fp8_rows
        self.takes_grouped = grouped_rows_sm90.takes
        self.grouped = grouped_rows_sm90.grouped_rows
        self._int4_few = linear_rows_sm90.int4_rows
        self._int4_many = linear_int4_sm90.int4_product

    def int4(self, x: Tensor, matrix: Int4Tiles, *, gated: bool = False, split: bool = False) -> Tensor:
        product = self._int4_few if self.takes(x) else self._int4_many
        return product(x, matrix, gated=gated, split=split)


@cache
def few_rows_door(device: torch.device) -> FewRows | None:
    """The kernels of a device, chosen once; None where there are none."""
    return HopperRows() if kernel_capability(device) == HOPPER else None


def dense_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times the transposed weight [N, K] -> [T, N], by the device's kernel for few rows or by cuBLAS."""
    few = few_rows_door(x.device)
    return few.dense(x, weight) if few is not None and few.takes(x) else plain_product(x, weight)
