"""Plain references of quantised products, which their kernels are compared with: elements made of what kernels hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import FP8_PAIR_INPUTS, fp8_inputs
from modelserve_worker.kernels.products.fp8_linear import SCALE_BLOCK, Fp8Pairs, e4m3_precision, paired
from modelserve_worker.kernels.products.int4_linear import PLANE_INPUTS, PLANES, Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs

SYMMETRIC_ZERO = 8  # the stored value of 0 without zero points
PLANE = FP8_PAIR_INPUTS // 2


def int4_elements(tiles: Int4Tiles, dtype: torch.dtype) -> Tensor:
    """The elements [N, K] of a matrix in `dtype`, each rounded once; with experts [E, N, K].

    Beside the result it takes half a byte an element.
    """
    *leading, count, rows, _ = tiles.words.shape
    elements = torch.empty((*leading, rows, count, PLANES, PLANE_INPUTS), dtype=dtype, device=tiles.words.device)
    for plane in range(PLANES):
        nibbles = tiles.words >> 4 * plane
        elements[..., plane, :].copy_(nibbles.bitwise_and_(15).transpose(-3, -2))
    grouped = elements.view(*leading, rows, count, tiles.scales.shape[-2], -1)
    if tiles.zero_points is None:
        grouped.sub_(SYMMETRIC_ZERO)
    else:
        grouped.sub_(_int4_zeros(tiles).movedim(-1, -3).unsqueeze(-1))
    grouped.mul_(tiles.scales.movedim(-1, -3).unsqueeze(-1))
    return elements.flatten(-3)[..., : tiles.inputs]


def _int4_zeros(tiles: Int4Tiles) -> Tensor:
    """uint8 of the shape of the scales."""
    assert tiles.zero_points is not None
    both = torch.stack((tiles.zero_points & 15, tiles.zero_points >> 4), dim=-2).flatten(-3, -2)
    return both[..., : tiles.scales.shape[-2], :]


def unpaired(elements: Tensor) -> Tensor:
    """The reverse of `paired`."""
    return elements.reshape(*elements.shape[:-1], -1, PLANE, 2).transpose(-1, -2).flatten(-3)


def fp8_elements(matrix: Fp8Pairs, dtype: torch.dtype) -> Tensor:
    """The elements [N, K] of a matrix in `dtype`, each times its scale and rounded once; with experts [E, N, K]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    elements = unpaired(matrix.elements.to(wide))[..., : matrix.inputs]
    scales = matrix.scales.to(wide)
    if not matrix.scale_rows:
        return (elements * scales.unsqueeze(-1)).to(dtype)
    rows = scales.repeat_interleave(matrix.scale_rows, -2)[..., : matrix.rows, :]
    return (elements * rows.repeat_interleave(SCALE_BLOCK, -1)[..., : matrix.inputs]).to(dtype)


def int8_elements(matrix: Int8Pairs, dtype: torch.dtype) -> Tensor:
    """The elements [N, K] of a matrix in `dtype`, each times its scale and rounded once; with experts [E, N, K]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    elements, scales = unpaired(matrix.elements.to(wide))[..., : matrix.inputs], matrix.scales.to(wide)
    each = scales.mT.repeat_interleave(matrix.group, -1) if matrix.group else scales.unsqueeze(-1)
    return (elements * each).to(dtype)


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (float8_e4m3fn [T, K rounded up to 64] in the order of pairs, scales float32 [T, 1]).

    A row's scale is the least power of two, from 2^-126 on, that leaves no element above 448.
    """
    wide = functional.pad(x.float(), (0, fp8_inputs(x.shape[1]) - x.shape[1]))
    largest = e4m3_precision(wide.abs().amax(dim=1, keepdim=True))
    scales = torch.exp2((largest / 448).log2().ceil().clamp(min=-126))
    rounded = (wide / scales).to(torch.float8_e4m3fn)
    return paired(rounded.view(torch.uint8)).contiguous().view(torch.float8_e4m3fn), scales


class PlainInt4:
    """What the kernels are compared with, in plain PyTorch: dequantise, then multiply."""

    def linear(self, x: Tensor, tiles: Int4Tiles) -> Tensor:
        return functional.linear(x, int4_elements(tiles, x.dtype))

    def grouped(self, x: Tensor, tiles: Int4Tiles, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, int4_elements(tiles, x.dtype).transpose(1, 2), offs=ends)


class PlainFp8:
    """What the kernels are compared with: dequantise, then multiply."""

    def linear(self, x: Tensor, matrix: Fp8Pairs) -> Tensor:
        x = e4m3_precision(x) if matrix.rounds_inputs else x
        return functional.linear(x, fp8_elements(matrix, x.dtype))

    def grouped(self, x: Tensor, matrix: Fp8Pairs, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, fp8_elements(matrix, x.dtype).transpose(1, 2), offs=ends)


class PlainInt8:
    """Likewise of INT8."""

    def linear(self, x: Tensor, matrix: Int8Pairs) -> Tensor:
        return functional.linear(x, int8_elements(matrix, x.dtype))

    def grouped(self, x: Tensor, matrix: Int8Pairs, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, int8_elements(matrix, x.dtype).transpose(1, 2), offs=ends)
