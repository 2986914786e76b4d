"""NVFP4: e2m1 elements, two in a byte, an e4m3 scale for each 16 inputs, and a float32 scale for each matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelserve.model.weight_format import NVFP4_GROUP, Layout, MatrixFormat
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles, repack_nvfp4
from modelserve_worker.layers.stored.matrix import QuantisedMatrix, frozen

# An element of four bits, s e e m, lies behind four zeros in a signed byte. Widened to the bits of the compute type and
# shifted, its exponent and mantissa are the lowest of those and its sign is above them, repeated: what is masked is a
# number that is 2^126 times too small.
_BIAS = 2.0**126
_BITS = {torch.bfloat16: (torch.int16, 2, -0x7E40), torch.float32: (torch.int32, 18, -0x7E400000)}


class Nvfp4Matrix(QuantisedMatrix):
    """`packed` uint8 [rows, columns / 2], the first of two elements in the low half, times `scale` e4m3
    [rows, columns / 16] times `row_scale` float32 [rows, 1].

    The scale of each checkpoint matrix is read into `global_scale`, float32 [experts or 1, stacked matrices], and
    becomes one of its rows; compressed-tensors stores its reciprocal.
    """

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        weight_format: MatrixFormat,
        device: torch.device,
        **stored: Any,
    ) -> None:
        super().__init__(parts, columns, **stored)
        self.layout = weight_format.layout
        self.packed = self._parameter(self.rows, columns // 2, torch.uint8, device)
        self.scale = self._parameter(self.rows, columns // NVFP4_GROUP, torch.float8_e4m3fn, device)
        self.row_scale = self._parameter(self.rows, 1, torch.float32, device)
        self.global_scale: Tensor | None = torch.empty((max(1, self.experts), len(self.parts)), dtype=torch.float32)

    def dense(self) -> Tensor:
        bits, shift, mask = _BITS[self.dtype]
        elements = self._scratch((*self.packed.shape, 2), self.dtype, self.packed.device)
        half = self._scratch(self.packed.shape, torch.uint8, self.packed.device, start=elements.nbytes)
        places = elements.view(bits)
        torch.bitwise_left_shift(self.packed, 4, out=half)
        places[..., 0].copy_(half.view(torch.int8))
        torch.bitwise_and(self.packed, 0xF0, out=half)
        places[..., 1].copy_(half.view(torch.int8))
        places.bitwise_left_shift_(shift).bitwise_and_(mask)
        elements.mul_(_BIAS)
        grouped = elements.view(*self.scale.shape, NVFP4_GROUP)
        grouped.mul_(self.scale.to(self.dtype).unsqueeze(-1))  # exact: two significant bits by four
        return elements.flatten(-2).mul_(self.row_scale)

    def loaded(self) -> None:
        assert self.global_scale is not None
        scales, self.global_scale = self.global_scale, None
        if self.layout is Layout.COMPRESSED_TENSORS:
            scales = scales.reciprocal()
        self.row_scale.copy_(self._by_row(scales).reshape(self.row_scale.shape))
        self.scale.view(torch.uint8).bitwise_and_(0x7F)  # the one with a sign that is let in is zero
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        tiles = repack_nvfp4(self.packed, self.scale, self.row_scale.squeeze(-1))
        self.packed, self.scale = frozen(tiles.words), frozen(tiles.scales)
        self.row_scale = frozen(tiles.row_scales)

    def held(self) -> Nvfp4Tiles:
        return Nvfp4Tiles(self.packed, self.scale, self.row_scale, self.columns)
