"""FP8 (e4m3) weights as the kernels read them, how published ones are brought into that order, and the plain twins.

Published (compressed-tensors, float-quantized): elements [N, K] and one scale for all, one per row, or one per block of
128 x 128. Ours: of every 64 inputs element c lies beside element 32 + c, c < 32, so that a 16-bit pair gives one
element to each of two *planes* of consecutive inputs, two bfloat16 an instruction. A product does not mind the order of
its inputs: activations that are rounded to e4m3 are written in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.quantised_tiles import FP8_PAIR_INPUTS, fp8_inputs

SCALE_BLOCK = 128  # rows and inputs that share a scale of a blockwise matrix
LARGEST = 448.0  # of e4m3
REPACKED_ELEMENTS = 1 << 25  # at a time: what bounds the extra memory of a repack, at two bytes an element
_PLANE = FP8_PAIR_INPUTS // 2


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix of N rows and K inputs; experts put a dimension E before all others.

    elements float8_e4m3fn [N, K rounded up to 64], zeros past the inputs. scales float32 [N], or blockwise
    [ceil(N / 128), ceil(K / 128)]. `rounds_inputs`: the checkpoint was made for inputs rounded to e4m3 by row, so that
    a product may do so.
    """

    elements: Tensor
    scales: Tensor
    inputs: int
    rounds_inputs: bool

    @property
    def rows(self) -> int:
        return self.elements.shape[-2]

    @property
    def blockwise(self) -> bool:
        return self.scales.dim() == self.elements.dim()

    def expert(self, index: int) -> Fp8Matrix:
        """The matrix of one expert, in the same memory."""
        return Fp8Matrix(self.elements[index], self.scales[index], self.inputs, self.rounds_inputs)


def repack_fp8(weight: Tensor, scale: Tensor, *, rounds_inputs: bool) -> Fp8Matrix:
    """Published elements float8_e4m3fn [N, K] and their scales -> a matrix for the kernels.

    scale of one element, [N, 1], or [ceil(N / 128), ceil(K / 128)], of any floating dtype. `weight` is given up: where
    K is a multiple of 64 the result lies in its memory. The extra memory is 64 MiB at most. Raises ValueError for
    scales of another shape.
    """
    rows, inputs = weight.shape
    blocks = -(-rows // SCALE_BLOCK), -(-inputs // SCALE_BLOCK)
    scales = scale.float()
    if scale.numel() == 1:
        scales = scales.reshape(1).repeat(rows)
    elif scale.shape == (rows, 1):
        scales = scales.flatten().contiguous()
    elif scale.shape != blocks:
        raise ValueError(f"scales {list(scale.shape)} do not fit FP8 weights of {rows} rows and {inputs} inputs")
    stored = fp8_inputs(inputs)
    weight = weight.contiguous()
    octets = weight.view(torch.uint8)
    elements = octets if stored == inputs else torch.empty((rows, stored), dtype=torch.uint8, device=weight.device)
    most = max(1, REPACKED_ELEMENTS // stored)
    for first in range(0, rows, most):
        some = slice(first, first + most)
        elements[some] = paired(functional.pad(octets[some], (0, stored - inputs)))
    return Fp8Matrix(elements.view(torch.float8_e4m3fn), scales, inputs, rounds_inputs)


def paired(elements: Tensor) -> Tensor:
    """The last dimension, a multiple of 64, in the order of pairs."""
    return elements.reshape(*elements.shape[:-1], -1, 2, _PLANE).transpose(-1, -2).flatten(-3)


def unpaired(elements: Tensor) -> Tensor:
    """The reverse of `paired`."""
    return elements.reshape(*elements.shape[:-1], -1, _PLANE, 2).transpose(-1, -2).flatten(-3)


def dequantised(matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """A matrix without experts -> [N, K] of `dtype`; element times scale is rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    elements = unpaired(matrix.elements.to(wide))[:, : matrix.inputs]
    scales = matrix.scales.to(wide)
    if not matrix.blockwise:
        return (elements * scales.unsqueeze(1)).to(dtype)
    each = scales.repeat_interleave(SCALE_BLOCK, 0)[: matrix.rows].repeat_interleave(SCALE_BLOCK, 1)
    return (elements * each[:, : matrix.inputs]).to(dtype)


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (float8_e4m3fn [T, K rounded up to 64] in the order of pairs, scales float32 [T, 1]).

    The largest element of a row becomes 448; a row of zeros has the scale 1.
    """
    wide = functional.pad(x.float(), (0, fp8_inputs(x.shape[1]) - x.shape[1]))
    largest = wide.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    rounded = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return paired(rounded.view(torch.uint8)).contiguous().view(torch.float8_e4m3fn), scales


class Fp8Door(Protocol):
    """Products with FP8 weights on one kind of device."""

    def linear(self, x: Tensor, matrix: Fp8Matrix) -> Tensor:
        """x [T, K] times the transposed matrix -> [T, N] in the dtype of x."""
        ...

    def grouped(self, x: Tensor, matrix: Fp8Matrix, ends: Tensor) -> Tensor:
        """Rows sorted by expert: rows [ends[e - 1], ends[e]) of x [R, K] times the matrix of expert e -> [R, N].

        ends int32 [E], which never leave the device. Rows from ends[E - 1] on are undefined.
        """
        ...


class PlainFp8:
    """The products in plain PyTorch: dequantise, then multiply. Inputs are never rounded, which is nearer the truth."""

    def linear(self, x: Tensor, matrix: Fp8Matrix) -> Tensor:
        return functional.linear(x, dequantised(matrix, x.dtype))

    def grouped(self, x: Tensor, matrix: Fp8Matrix, ends: Tensor) -> Tensor:
        matrices = torch.stack([dequantised(matrix.expert(e), x.dtype) for e in range(len(ends))])
        return functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)


@cache
def fp8_door(device: torch.device) -> Fp8Door:
    """The implementation for a device, chosen once: kernels on CUDA, the plain twin elsewhere."""
    if device.type != "cuda":
        return PlainFp8()
    from modelserve_worker.kernels.fp8_linear_triton import TritonFp8

    return TritonFp8(device)
