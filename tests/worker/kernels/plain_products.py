"""Plain references of quantised products, which their kernels are compared with: elements made of what kernels hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import FP8_PAIR_INPUTS, fp8_inputs
from modelserve_worker.kernels.products.fp8_linear import SCALE_BLOCK, Fp8Pairs, e4m3_precision, paired
from modelserve_worker.kernels.products.int4_linear import PLANE_INPUTS, Int4Tiles
from modelserve_worker.kernels.products.int4_linear import PLANES as INT4_PLANES
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.nvfp4_linear import GROUPS, LANES, PLANES, SCALE_ZERO, Nvfp4Tiles

SYMMETRIC_ZERO = 8  # the stored value of 0 without zero points
PLANE = FP8_PAIR_INPUTS // 2


def fine_scales(*shape: int, size: float, device: torch.device | str = "cpu") -> Tensor:
    """float16 of both signs, each of which loses 1.5e-3 to 3e-3 of itself where it is rounded to bfloat16."""
    sizes = ((torch.rand(shape, device=device) + 0.5) * size).half().view(torch.int16) & ~7 | 3
    return sizes.view(torch.float16) * (torch.randint(2, shape, device=device) * 2 - 1).half()


def int4_zero_points(tiles: int, groups: int, outputs: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Of random groups, as `Int4Tiles` has them."""
    return torch.randint(256, (tiles, (groups + 1) // 2, outputs), device=device).to(torch.uint8)


def gain(actual: Tensor, expected: Tensor) -> float:
    """What `actual` is `expected` times, less one: roundings of many outputs cancel, those of their scales do not."""
    return float((actual.double() * expected).sum() / expected.square().sum()) - 1


def int4_elements(tiles: Int4Tiles, dtype: torch.dtype) -> Tensor:
    """The elements [N, K] of a matrix in `dtype`, each rounded once; with experts [E, N, K].

    Beside the result it takes half a byte an element.
    """
    *leading, count, rows, _ = tiles.words.shape
    elements = torch.empty((*leading, rows, count, INT4_PLANES, PLANE_INPUTS), dtype=dtype, device=tiles.words.device)
    for plane in range(INT4_PLANES):
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


def nvfp4_elements(tiles: Nvfp4Tiles, dtype: torch.dtype) -> Tensor:
    """The elements [N, K] of a matrix in `dtype`, each times its scales and rounded once; with experts [E, N, K]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=wide, device=tiles.words.device)
    *leading, count, rows, _ = tiles.words.shape
    words = tiles.words.view(*leading, count, rows, LANES, PLANES)
    nibbles = torch.stack([words >> bits & 15 for i in range(4) for bits in (4 * i, 4 * i + 16)], dim=-1)
    nibbles = nibbles.unflatten(-1, (4, 2)).movedim(-4, -2).movedim(-5, -6)  # rows, tiles, planes, pairs, lanes, halves
    elements = (sizes[nibbles & 7] * torch.where(nibbles & 8 != 0, -1, 1)).reshape(*leading, rows, count, GROUPS, -1)
    scales = ((tiles.scales.int() << 20) + SCALE_ZERO).view(torch.float32).to(wide)
    elements.mul_(scales.movedim(-1, -3).unsqueeze(-1))
    elements.mul_(tiles.row_scales.to(wide).view(*leading, rows, 1, 1, 1))
    return elements.flatten(-3)[..., : tiles.inputs].to(dtype)


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


class PlainNvfp4:
    """What the kernels are compared with: dequantise, then multiply."""

    def linear(self, x: Tensor, matrix: Nvfp4Tiles) -> Tensor:
        return functional.linear(x, nvfp4_elements(matrix, x.dtype))

    def grouped(self, x: Tensor, matrix: Nvfp4Tiles, ends: Tensor) -> Tensor:
        return functional.grouped_mm(x, nvfp4_elements(matrix, x.dtype).transpose(1, 2), offs=ends)
