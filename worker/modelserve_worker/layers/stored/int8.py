"""INT8: signed elements, a scale for each row or for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelserve.model.weight_format import Layout, MatrixFormat
from modelserve_worker.kernels.products.int8_linear import Int8Pairs, repack_int8
from modelserve_worker.layers.stored.int4_layouts import transposed, words_by_rows
from modelserve_worker.layers.stored.matrix import QuantisedMatrix, frozen

WORD = 4  # elements of an int32
SIGNS = -0x7F7F7F80  # 0x80 in each byte: what is stored with 128 added, without
PACKED_LAYOUTS = (Layout.PACKED_INT8, Layout.GPTQ, Layout.GPTQ_V2)


class Int8Matrix(QuantisedMatrix):
    """`weight` int8 [rows, columns] times `scale`: float32 [rows, 1], or in the type that the format names
    [rows, columns / group].

    Layouts of words hold elements with 128 added, four in an int32, the first in the lowest byte: [rows, columns / 4],
    GPTQ's transposed, as its scales are. `loaded` makes int8 of them.
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
        self.layout, self.group_size = weight_format.layout, weight_format.group_size
        self.scale_type = weight_format.scale_type
        turned = self.layout in (Layout.GPTQ, Layout.GPTQ_V2)
        words = self.layout in PACKED_LAYOUTS
        element, width = (torch.int32, columns // WORD) if words else (torch.int8, columns)
        self.weight = self._parameter(self.rows, width, element, device, transposed=turned)
        groups, scale_type = 1, torch.float32
        if self.group_size is not None:
            groups, scale_type = columns // self.group_size, getattr(torch, weight_format.scale_type)
        self.scale = self._parameter(self.rows, groups, scale_type, device, transposed=turned)

    def dense(self) -> Tensor:
        elements = self._scratch(self.weight.shape, self.dtype, self.weight.device)
        elements.copy_(self.weight)
        elements.view(*self.scale.shape, -1).mul_(self.scale.unsqueeze(-1))
        return elements

    def loaded(self) -> None:
        words = self.weight
        if self.layout in (Layout.GPTQ, Layout.GPTQ_V2):
            words = frozen(words_by_rows(words, self.layout))
            self.scale = frozen(transposed(self.scale))
        if self.layout in PACKED_LAYOUTS:
            self.weight = frozen(words.bitwise_xor_(SIGNS).view(torch.int8))
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        pairs = repack_int8(self.weight, self.scale, self.group_size or 0)
        self.weight, self.scale = frozen(pairs.elements), frozen(pairs.scales)

    def held(self) -> Int8Pairs:
        return Int8Pairs(self.weight, self.scale, self.columns, self.group_size or 0)
