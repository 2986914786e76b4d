"""Plain twins of the doors of quantised products, which their kernels are compared with."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from modelserve_worker.kernels import fp8_linear, int4_linear
from modelserve_worker.kernels.fp8_linear import Fp8Pairs
from modelserve_worker.kernels.int4_linear import Int4Tiles


class PlainInt4:
    """What the kernels are compared with, in plain PyTorch: dequantise, then multiply."""

    def linear(self, x: Tensor, tiles: Int4Tiles) -> Tensor:
        return functional.linear(x, int4_linear.dequantised(tiles, x.dtype))

    def grouped(self, x: Tensor, tiles: Int4Tiles, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, int4_linear.dequantised(tiles, x.dtype).transpose(1, 2), offs=ends)


class PlainFp8:
    """What the kernels are compared with: dequantise, then multiply. Inputs are not rounded, which is nearer truth."""

    def linear(self, x: Tensor, matrix: Fp8Pairs) -> Tensor:
        return functional.linear(x, fp8_linear.dequantised(matrix, x.dtype))

    def grouped(self, x: Tensor, matrix: Fp8Pairs, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, fp8_linear.dequantised(matrix, x.dtype).transpose(1, 2), offs=ends)
