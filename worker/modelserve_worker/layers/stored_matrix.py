"""A matrix of a linear layer as the checkpoint stores it, and the one product that layers ask of it.

Parameters have the checkpoint's own layout, so that a loader copies bytes. `loaded` follows the last byte: what a
format turns once it turns there, matrix by matrix, and where kernels multiply by it, it takes the order of theirs
(`repack`; `modelserve.sizing.weights.quantised_tiles` counts). Elsewhere products are the plain ones: the matrix in the
compute type, made anew each time, then PyTorch's product. Which it is, of how many rows, the table of kernels says
(`Operations.products`). Those matrices share one workspace, since a stream computes one product after the other;
`modelserve.sizing.weights.dequantisation` says its size. Nothing waits for the host and no shape depends on a value, so
a step that multiplies by any of them can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelserve.model.weight_format import FP8_BLOCK, StoredType, TextLinear, WeightFormat
from modelserve_worker.kernels.elementwise.elementwise import ElementwiseBackend
from modelserve_worker.kernels.operations import MatrixProducts
from modelserve_worker.kernels.products.fp8_linear import Fp8Pairs, e4m3_precision, repack_fp8
from modelserve_worker.kernels.products.int4_linear import (
    Int4Tiles,
    nibbles,
    packed_nibbles,
    repack_int4,
    unpack_nibbles,
)
from modelserve_worker.layers.placement import Placement

PACKED = 8  # int4 elements of an int32
ZERO = 8  # what stands for zero in a symmetric int4 matrix: elements are stored with this added
Held = Tensor | Int4Tiles | Fp8Pairs  # a matrix as kernels take it


class StoredMatrix(nn.Module):
    """[rows, columns], or [experts, rows, columns]; several checkpoint matrices may be stacked in the rows."""

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        experts: int,
        dtype: torch.dtype,
        products: MatrixProducts,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.rows, self.columns, self.experts = sum(parts), columns, experts
        self.dtype = dtype  # of inputs, results and `dense`
        self.workspace: Tensor | None = None  # uint8, shared with other matrices; without one, scratch is new each time
        self.products = products  # of experts: grouped ones

    def linear(self, x: Tensor) -> Tensor:
        """x [T, columns] in the compute dtype -> [T, rows]. Not for experts."""
        return self._product(x)

    def in_parts(self, x: Tensor) -> Tensor:
        """`linear`, or float32 [P, T, rows] whose sum over P it is before it is rounded."""
        return self._product(x, split=True)

    def gated(self, x: Tensor, elementwise: ElementwiseBackend) -> Tensor:
        """gelu(first half of `linear`) * second half, each rounded: [T, columns] -> [T, rows / 2]."""
        product = self.products.of(x.shape[0])
        if product is not None and product.choice.ends.gated and x.shape[0]:
            return self._product(x, gated=True)
        return elementwise.gated_gelu(self.linear(x))

    def _product(self, x: Tensor, *, gated: bool = False, split: bool = False) -> Tensor:
        product = self.products.of(x.shape[0])
        x = self._ordered(x)
        if product is None or product.multiply is None:
            return self.products.elements.dense(self._rounded(x), self.dense())
        if not x.shape[0]:
            return x.new_empty((0, self.rows))
        ends = {"gated": gated, "split": split and product.choice.ends.split}
        return product.multiply(x, self._held(), **{name: True for name, asked in ends.items() if asked})

    def _ordered(self, x: Tensor) -> Tensor:
        """Inputs in the order of the matrix's columns."""
        return x

    def _rounded(self, x: Tensor) -> Tensor:
        """Inputs as the format's kernels round them."""
        return x

    def _held(self) -> Held:
        """The parameters as kernels take them."""
        raise NotImplementedError

    @property
    def dequantises(self) -> bool:
        """Whether its products use the workspace."""
        return False

    @property
    def on_kernels(self) -> bool:
        """Whether kernels multiply by it, any number of rows."""
        return self.products.on_kernels

    def grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        """Of experts: rows [ends[e - 1], ends[e]) of x [R, columns] by the matrix of expert e -> [R, rows].

        ends int32 [experts]. Rows from the last end on are undefined.
        """
        return self._grouped_product(x, ends)

    def grouped_gated(self, x: Tensor, ends: Tensor, elementwise: ElementwiseBackend) -> Tensor:
        """gelu(first half of `grouped`) * second half, each rounded: [R, columns] -> [R, rows / 2]."""
        product = self.products.of(x.shape[0])
        if product is not None and product.choice.ends.gated:
            return self._grouped_product(x, ends, gated=True)
        return elementwise.gated_gelu(self.grouped(x, ends))

    def _grouped_product(self, x: Tensor, ends: Tensor, **fused: bool) -> Tensor:
        product = self.products.of(x.shape[0])
        x = self._ordered(x)
        if product is None or product.multiply is None:
            return self.products.elements.grouped(x, self.dense(), ends)
        return product.multiply(x, self._held(), ends, **fused)

    def dense(self) -> Tensor:
        """The elements in the compute dtype, each rounded once: the parameter where it is that, else scratch, which
        holds until the next product by any matrix of the same workspace. Not after `repack` for kernels."""
        raise NotImplementedError

    def loaded(self) -> None:
        """All parameters are filled: called once, before the first product. Raises ValueError for what cannot be."""
        self.repack()

    def repack(self) -> None:
        """Bring the parameters into the order of the device's kernels, where it has some for them."""

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, start: int = 0) -> Tensor:
        """Memory of the shared workspace from byte `start` on, or new memory where there is none."""
        if self.workspace is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        return self.workspace[start : start + size].view(dtype).view(*shape)

    def _parameter(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        leading = (self.experts,) if self.experts else ()
        return nn.Parameter(torch.empty((*leading, rows, columns), dtype=dtype, device=device), requires_grad=False)


class DenseMatrix(StoredMatrix):
    """Elements in the compute dtype: `weight`."""

    def __init__(self, parts: Sequence[int], columns: int, *, device: torch.device, **stored: Any) -> None:
        super().__init__(parts, columns, **stored)
        self.weight = self._parameter(self.rows, columns, self.dtype, device)

    def dense(self) -> Tensor:
        return self.weight

    def _held(self) -> Tensor:
        return self.weight


class QuantisedMatrix(StoredMatrix):
    """Multiplied by kernels, in whose order `repack` brings it, or dequantised for each product."""

    @property
    def dequantises(self) -> bool:
        return not self.on_kernels


class Int4Matrix(QuantisedMatrix):
    """compressed-tensors pack-quantized: (q - zero) * scale, one scale (and zero) per row and group of columns.

    `packed` int32 [rows, columns / 8]: nibble j of a word, the lowest first, is element 8 w + j. `scale` bfloat16
    [rows, columns / group]. `zero_point` int32 [rows / 8, columns / group], packed along the rows in the same way;
    without one the zero is 8. With an activation order the groups are of columns that lie apart: `loaded` puts the
    columns of a group beside each other, and `order` int32 [columns] says which input each column takes.
    """

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        weight_format: WeightFormat,
        device: torch.device,
        **stored: Any,
    ) -> None:
        super().__init__(parts, columns, **stored)
        assert weight_format.group_size is not None
        self.group_size = weight_format.group_size
        groups = columns // self.group_size
        self.packed = self._parameter(self.rows, columns // PACKED, torch.int32, device)
        self.scale = self._parameter(self.rows, groups, torch.bfloat16, device)
        self.zero_point: nn.Parameter | None = None
        if not weight_format.symmetric:
            self.zero_point = self._parameter(self.rows // PACKED, groups, torch.int32, device)
        self.order: nn.Parameter | None = None
        self.group_index: Tensor | None = None  # of each stacked matrix; given up by `loaded`
        if weight_format.activation_order:
            order = torch.empty(columns, dtype=torch.int32, device=device)
            self.order = nn.Parameter(order, requires_grad=False)
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
        if self.order is not None:
            self._put_in_order(self.order)
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        tiles = repack_int4(self.packed, self.scale, self.zero_point)
        self.packed = nn.Parameter(tiles.words, requires_grad=False)
        self.scale = nn.Parameter(tiles.scales, requires_grad=False)
        if tiles.zero_points is not None:
            self.zero_point = nn.Parameter(tiles.zero_points, requires_grad=False)

    def _held(self) -> Int4Tiles:
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


class Fp8Matrix(QuantisedMatrix):
    """compressed-tensors float-quantized: `weight` e4m3 [rows, columns] times `scale`, float32.

    One scale per row [rows, 1], or per block of 128 x 128 [blocks, ceil(columns / 128)], where the blocks of each
    stacked matrix begin with its first row. A scale per checkpoint matrix is read into `tensor_scale` (float32, one for
    each stacked matrix) and becomes one per row.
    """

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        *,
        weight_format: WeightFormat,
        device: torch.device,
        **stored: Any,
    ) -> None:
        super().__init__(parts, columns, **stored)
        self.weight = self._parameter(self.rows, columns, torch.float8_e4m3fn, device)
        self.blocks = weight_format.scales == "block"
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
            by_row = torch.cat([scales[:, i : i + 1].expand(-1, part) for i, part in enumerate(self.parts)], dim=1)
            self.scale.copy_(by_row.reshape(self.scale.shape))
        self.repack()

    def repack(self) -> None:
        if not self.on_kernels:
            return
        pairs = repack_fp8(self.weight, self.scale, rounds_inputs=self.rounds_inputs, parts=self.parts)
        self.weight = nn.Parameter(pairs.elements, requires_grad=False)
        self.scale = nn.Parameter(pairs.scales, requires_grad=False)
        self.scale_rows = pairs.scale_rows

    def _rounded(self, x: Tensor) -> Tensor:
        return e4m3_precision(x) if self.rounds_inputs else x

    def _held(self) -> Fp8Pairs:
        return Fp8Pairs(self.weight, self.scale, self.columns, self.scale_rows, self.rounds_inputs)

    def _row_scales(self) -> Tensor:
        """float32 [..., rows, ceil(columns / 128)]."""
        of_parts = torch.split(self.scale, list(self.block_rows), dim=-2)
        rows = (
            scale.repeat_interleave(FP8_BLOCK, dim=-2).narrow(-2, 0, part)
            for scale, part in zip(of_parts, self.parts, strict=True)
        )
        return torch.cat(tuple(rows), dim=-2)


def stored_matrix(
    linear: TextLinear, parts: Sequence[int], columns: int, placement: Placement, *, experts: int = 0
) -> StoredMatrix:
    """The matrix of one linear layer in the checkpoint's format: `parts` rows of each stacked matrix, `columns` inputs.

    A dense matrix is held in the dtype that is computed in. Raises KeyError where the placement's table of kernels is
    of a model without this matrix.
    """
    weight_format = placement.weight_format
    stored = StoredType.BFLOAT16 if weight_format is None else weight_format.of(linear)
    shape = sum(parts), columns
    arguments: dict[str, Any] = {
        "experts": experts,
        "dtype": placement.dtype,
        "products": placement.operations.products(linear, shape, stored, grouped=experts > 0),
        "device": placement.device,
    }
    if weight_format is not None and stored is StoredType.INT4:
        return Int4Matrix(parts, columns, weight_format=weight_format, **arguments)
    if weight_format is not None and stored is StoredType.FP8:
        return Fp8Matrix(parts, columns, weight_format=weight_format, **arguments)
    return DenseMatrix(parts, columns, **arguments)
