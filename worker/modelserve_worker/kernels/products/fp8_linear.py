"""FP8 (e4m3) weights as the kernels read them, and how published ones are brought into that order.

Published (compressed-tensors, float-quantized): elements [N, K] and one scale for all, one per row, or one per block of
128 x 128. Ours: of every 64 inputs element c lies beside element 32 + c, c < 32, so that a 16-bit pair gives one
element to each of two *planes* of consecutive inputs, two bfloat16 an instruction. A product does not mind the order of
its inputs: activations that are rounded to e4m3 are written in the same order.

Where a checkpoint was made for rounded inputs, every product rounds them to the same four significant bits, at any
number of rows (decision 0036): in their own type as they are read, or to e4m3 itself by a power of two for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import FP8_PAIR_INPUTS, fp8_inputs, fp8_scale_rows

SCALE_BLOCK = 128  # rows and inputs that share a scale of a blockwise matrix
REPACKED_ELEMENTS = 1 << 25  # at a time: what bounds the extra memory of a repack, at two bytes an element
_PLANE = FP8_PAIR_INPUTS // 2
_HALF_A_STEP = 1 << 19  # of float32's 23 bits behind the point, of which three are kept


@dataclass(frozen=True, slots=True)
class Fp8Pairs:
    """A matrix of N rows and K inputs; experts put a dimension E before all others.

    elements float8_e4m3fn [N, K rounded up to 64], zeros past the inputs. scales float32 [N] with `scale_rows` 0, or
    blockwise [ceil(N / scale_rows), ceil(K / 128)]. `rounds_inputs`: the checkpoint was made for inputs rounded to e4m3
    by row, so that every product rounds them to its precision.
    """

    elements: Tensor
    scales: Tensor
    inputs: int
    scale_rows: int
    rounds_inputs: bool

    @property
    def rows(self) -> int:
        return self.elements.shape[-2]


def repack_fp8(
    weight: Tensor,
    scale: Tensor,
    *,
    rounds_inputs: bool,
    parts: Sequence[int] = (),
    at_a_time: int = REPACKED_ELEMENTS,
) -> Fp8Pairs:
    """Published elements float8_e4m3fn [N, K] and their float32 scales -> a matrix for the kernels.

    scale [N, 1], or [blocks, ceil(K / 128)] of blocks of 128 rows that begin anew with each of the `parts` (rows of the
    matrices that are stacked; left out: one). `weight` is given up: where K is a multiple of 64 the result lies in its
    memory. The extra memory is of so many elements `at_a_time`: 64 MiB. Experts may be a dimension before the others.
    Raises ValueError for scales of another shape.
    """
    *leading, rows, inputs = weight.shape
    parts = tuple(parts) or (rows,)
    block_rows = [-(-part // SCALE_BLOCK) for part in parts]
    if scale.shape == (*leading, rows, 1):
        scales, scale_rows = scale.squeeze(-1).contiguous(), 0
    elif scale.shape == (*leading, sum(block_rows), -(-inputs // SCALE_BLOCK)):
        scale_rows = fp8_scale_rows(parts)
        finer = scale.repeat_interleave(SCALE_BLOCK // scale_rows, dim=-2)
        of_parts = torch.split(finer, [count * SCALE_BLOCK // scale_rows for count in block_rows], dim=-2)
        needed = (-(-part // scale_rows) for part in parts)
        scales = torch.cat([each.narrow(-2, 0, count) for each, count in zip(of_parts, needed, strict=True)], dim=-2)
    else:
        raise ValueError(f"scales {list(scale.shape)} do not fit FP8 weights of {rows} rows and {inputs} inputs")
    stored = fp8_inputs(inputs)
    octets = weight.view(torch.uint8).view(-1, inputs)
    shape = (octets.shape[0], stored)
    elements = octets if stored == inputs else torch.empty(shape, dtype=torch.uint8, device=weight.device)
    most = max(1, at_a_time // stored)
    for first in range(0, octets.shape[0], most):
        some = slice(first, first + most)
        elements[some] = paired(functional.pad(octets[some], (0, stored - inputs)))
    held = elements.view(torch.float8_e4m3fn).view(*leading, rows, stored)
    return Fp8Pairs(held, scales, inputs, scale_rows, rounds_inputs)


def paired(elements: Tensor) -> Tensor:
    """The last dimension, a multiple of 64, in the order of pairs."""
    return elements.reshape(*elements.shape[:-1], -1, 2, _PLANE).transpose(-1, -2).flatten(-3)


def e4m3_precision(x: Tensor) -> Tensor:
    """bfloat16 or float32, from 2^-126 on, rounded to e4m3's four significant bits, ties to even; exponents stay."""
    wide = x.float()
    bits = wide.view(torch.int32)
    rounded = (bits + _HALF_A_STEP - 1 + (bits >> 20 & 1)) & -2 * _HALF_A_STEP
    return torch.where(wide.isnan(), wide, rounded.view(torch.float32)).to(x.dtype)
