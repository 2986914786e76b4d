"""INT4: eight elements in a word, a scale and perhaps a zero point for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelserve.model.weight_format import Layout, MatrixFormat
from modelserve_worker.kernels.products.int4_linear import (
    Int4Tiles,
    nibbles,
    packed_nibbles,
    repack_int4,
    unpack_nibbles,
)
from modelserve_worker.layers.stored.int4_layouts import PACKED, transposed, words_by_rows, zero_points_by_rows
from modelserve_worker.layers.stored.matrix import QuantisedMatrix, frozen

BY_ROWS = (Layout.COMPRESSED_TENSORS, Layout.GGUF)  # layouts that loading leaves in this order
ZERO = 8  # what stands for zero in a symmetric matrix: elements are stored with this added


class Int4Matrix(QuantisedMatrix):
    """(q - zero) * scale, one scale (and zero) per row and group of columns, in compressed-tensors' order.

    `packed` int32 [rows, columns / 8]: nibble j of a word, the lowest first, is element 8 w + j. `scale`, in the type
    that the format names, [rows, columns / group]. `zero_point` int32 [rows / 8, columns / group], packed along the
    rows in the same way; without one the zero is 8. Other layouts (`int4_layouts`) are read as they are, transposed,
    and brought into this order by `loaded`. With an activation order the groups are of columns that lie apart: `loaded`
    puts the columns of a group beside each other, and `order` int32 [columns] says which input each column takes.
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
        assert weight_format.group_size is not None
        self.group_size = weight_format.group_size
        groups = columns // self.group_size
        self.layout = weight_format.layout
        self.scale_type = weight_format.scale_type
        turned = self.layout not in BY_ROWS
        words = (self.rows // PACKED, columns) if self.layout is Layout.AWQ else (self.rows, columns // PACKED)
        self.packed = self._parameter(*words, torch.int32, device, transposed=turned)
        scale_type = getattr(torch, weight_format.scale_type)
        self.scale = self._parameter(self.rows, groups, scale_type, device, transposed=turned)
        self.zero_point: nn.Parameter | None = None
        if not weight_format.symmetric:
            self.zero_point = self._parameter(self.rows // PACKED, groups, torch.int32, device, transposed=turned)
        self.order: nn.Parameter | None = None
        self.group_index: Tensor | None = None  # of each stacked matrix; given up by `loaded`
        if weight_format.activation_order:
            self.order = frozen(torch.empty(columns, dtype=torch.int32, device=device))
            self.group_index = (torch.arange(columns, dtype=torch.int32) // self.group_size).repeat(len(self.parts), 1)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(-1, self.order)

    def dense(self) -> Tensor:
        device, packed_bytes = self.packed.device, self.packed.view(torch.uint8)
        elements = self._scratch((*self.packed.shape, PACKED), self.dtype, device)
        half = self._scratch(packed_bytes.shape, torch.uint8, device, start=elements.nbytes)
        unpack_nibbles(self.packed, elements, half)
        grouped = elements.view(*self.scale.shape, self.group_size)
        grouped.sub_(ZERO if self.zero_point is None else self._zeros().unsqueeze(-1))
        grouped.mul_(self.scale.unsqueeze(-1))
        return elements.flatten(-2)

    def loaded(self) -> None:
        if self.layout not in BY_ROWS:
            self.packed = frozen(words_by_rows(self.packed, self.layout))
            self.scale = frozen(transposed(self.scale))
            if self.zero_point is not None:
                self.zero_point = frozen(zero_points_by_rows(self.zero_point, self.layout))
        if self.order is not None:
            self._put_in_order(self.order)
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        tiles = repack_int4(self.packed, self.scale, self.zero_point)
        self.packed = frozen(tiles.words)
        self.scale = frozen(tiles.scales)
        if tiles.zero_points is not None:
            self.zero_point = frozen(tiles.zero_points)

    def held(self) -> Int4Tiles:
        return Int4Tiles(self.packed, self.scale, self.zero_point, self.columns)

    def _put_in_order(self, places: nn.Parameter) -> None:
        """Columns of one group beside each other, and in `places` the input that each takes."""
        assert self.group_index is not None
        index, self.group_index = self.group_index, None
        for part in index[1:]:
            if not torch.equal(part, index[0]):
                raise ValueError(
                    "matrices that are one product here have activation orders (weight_g_idx) of their own"
                )
        sizes = torch.bincount(index[0].clamp(min=0), minlength=self.scale.shape[-1])
        if bool((index[0] < 0).any()) or sizes.tolist() != [self.group_size] * self.scale.shape[-1]:
            raise ValueError(
                f"weight_g_idx does not give each of {self.scale.shape[-1]} groups {self.group_size} inputs"
            )
        order = index[0].argsort(stable=True).to(self.packed.device)
        places.copy_(order)
        self.packed.copy_(packed_nibbles(nibbles(self.packed).index_select(1, order)))

    def _zeros(self) -> Tensor:
        """[..., rows, groups] in the compute dtype."""
        assert self.zero_point is not None
        packed = self.zero_point
        zeros = torch.empty((*packed.shape, PACKED), dtype=self.dtype, device=packed.device)
        unpack_nibbles(packed, zeros, torch.empty_like(packed.view(torch.uint8)))
        return zeros.movedim(-1, -2).reshape(self.scale.shape)
