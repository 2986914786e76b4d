"""FP8: e4m3 elements, a scale for each row or for each block of 128 x 128."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelserve.model.weight_format import FP8_BLOCK, MatrixFormat
from modelserve_worker.kernels.products.fp8_linear import Fp8Pairs, e4m3_precision, repack_fp8
from modelserve_worker.layers.stored.matrix import QuantisedMatrix, frozen


class Fp8Matrix(QuantisedMatrix):
    """`weight` e4m3 [rows, columns] times `scale`, float32.

    One scale per row [rows, 1], or per block of 128 x 128 [blocks, ceil(columns / 128)], where the blocks of each
    stacked matrix begin with its first row. A scale per checkpoint matrix is read into `tensor_scale` (float32, one for
    each stacked matrix) and becomes one per row.
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
        self.weight = self._parameter(self.rows, columns, torch.float8_e4m3fn, device)
        self.blocks = weight_format.scales == "block"
        self.layout = weight_format.layout
        self.block_rows = tuple(-(-part // FP8_BLOCK) for part in self.parts)
        scales = (sum(self.block_rows), -(-columns // FP8_BLOCK)) if self.blocks else (self.rows, 1)
        self.scale = self._parameter(*scales, torch.float32, device)
        self.tensor_scale: Tensor | None = None
        if weight_format.scales == "tensor":
            self.tensor_scale = torch.empty((max(1, self.experts), len(self.parts)), dtype=torch.float32)
        self.rounds_inputs = weight_format.fp8_activations and not self.blocks and not self.experts
        self.scale_rows = 0  # of the kernels' scales

    def dense(self) -> Tensor:
        elements = self._scratch(self.weight.shape, self.dtype, self.weight.device)
        elements.copy_(self.weight)
        if not self.blocks:
            return elements.mul_(self.scale)
        scale, whole = self._row_scales(), self.columns // FP8_BLOCK
        blocks = elements[..., : whole * FP8_BLOCK].view(*elements.shape[:-1], whole, FP8_BLOCK)
        blocks.mul_(scale[..., :whole].unsqueeze(-1))
        elements[..., whole * FP8_BLOCK :].mul_(scale[..., whole:])
        return elements

    def loaded(self) -> None:
        if self.tensor_scale is not None:
            scales, self.tensor_scale = self.tensor_scale, None
            self.scale.copy_(self._by_row(scales).reshape(self.scale.shape))
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        pairs = repack_fp8(self.weight, self.scale, rounds_inputs=self.rounds_inputs, parts=self.parts)
        self.weight = frozen(pairs.elements)
        self.scale = frozen(pairs.scales)
        self.scale_rows = pairs.scale_rows

    def _rounded(self, x: Tensor) -> Tensor:
        return e4m3_precision(x) if self.rounds_inputs else x

    def held(self) -> Fp8Pairs:
        return Fp8Pairs(self.weight, self.scale, self.columns, self.scale_rows, self.rounds_inputs)

    def _row_scales(self) -> Tensor:
        """float32 [..., rows, ceil(columns / 128)]."""
        of_parts = torch.split(self.scale, list(self.block_rows), dim=-2)
        rows = (
            scale.repeat_interleave(FP8_BLOCK, dim=-2).narrow(-2, 0, part)
            for scale, part in zip(of_parts, self.parts, strict=True)
        )
        return torch.cat(tuple(rows), dim=-2)
