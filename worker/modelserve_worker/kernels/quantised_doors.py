"""The doors of products with quantised weights. Their plain twins dequantise, then multiply (`stored_matrix`)."""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from modelserve_worker.kernels.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.int4_linear import Int4Tiles
from modelserve_worker.kernels.linear_tiles import kernel_capability

MatrixT = TypeVar("MatrixT", contravariant=True)  # how the kernels hold a matrix, or one for each expert


class ProductDoor(Protocol[MatrixT]):
    """Products with weights of one format on one kind of device."""

    def linear(self, x: Tensor, matrix: MatrixT, /) -> Tensor:
        """x [T, K] times the transposed matrix -> [T, N] in the dtype of x."""
        ...

    def grouped(self, x: Tensor, matrix: MatrixT, ends: Tensor, /) -> Tensor:
        """Rows sorted by expert: rows [ends[e - 1], ends[e]) of x [R, K] times the matrix of expert e -> [R, N].

        ends int32 [E], which never leave the device. Rows from ends[E - 1] on are undefined.
        """
        ...


@cache
def int4_door(device: torch.device, *, exact: bool = False) -> ProductDoor[Int4Tiles] | None:
    """The kernels of a device, chosen once; None where there are none and matrices are multiplied as published."""
    capability = kernel_capability(device)
    if capability is None:
        return None
    from modelserve_worker.kernels.int4_linear_triton import TritonInt4

    return TritonInt4(capability, exact=exact)


@cache
def fp8_door(device: torch.device, *, exact: bool = False) -> ProductDoor[Fp8Pairs] | None:
    """The kernels of a device, chosen once; None where there are none and matrices are multiplied as published."""
    capability = kernel_capability(device)
    if capability is None:
        return None
    from modelserve_worker.kernels.fp8_linear_triton import TritonFp8

    return TritonFp8(capability, exact=exact)
