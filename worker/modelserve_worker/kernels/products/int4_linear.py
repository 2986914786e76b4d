"""INT4 weights as the kernels read them, and how published ones are brought into that order.

Published (compressed-tensors, pack-quantized): words [N, K / 8] whose nibble j, least significant first, is element
8 w + j of a row, stored as value + 8; one scale per row and group of g inputs; zero points packed alike along rows.

Ours: the inputs are cut into tiles of 256. Nibble j of word c of a tile is element 32 j + c of it, so nibble j of a
row's 32 words is a *plane* of 32 consecutive inputs: one operand of a matrix product, made of neighbouring words two
elements an instruction, with one scale. A tile of all rows is one piece of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import INT4_GROUPS, INT4_TILE_INPUTS, int4_tiles

PLANE_INPUTS = 32  # words of a row and tile
PLANES = INT4_TILE_INPUTS // PLANE_INPUTS  # nibbles of a word
REPACKED_ELEMENTS = 1 << 25  # at a time: what bounds the extra memory of a repack, at three bytes an element


@dataclass(frozen=True, slots=True)
class Int4Tiles:
    """A matrix of N rows and K inputs; experts put a dimension E before all others.

    words int32 [ceil(K / 256), N, 32]; scales bfloat16 or float16 [ceil(K / 256), 256 / g, N], for groups of g = 32,
    64, 128 or 256 inputs; zero_points uint8 [ceil(K / 256), ceil(128 / g), N], those of two groups in one, the first in
    the low half. Element = (nibble - zero point) * scale. Without zero points they are 8. Inputs from K on have the
    scale 0. A matrix of one expert has fewer than 2^31 words.
    """

    words: Tensor
    scales: Tensor
    zero_points: Tensor | None
    inputs: int

    @property
    def rows(self) -> int:
        return self.words.shape[-2]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return INT4_TILE_INPUTS // self.scales.shape[-2]


def repack_int4(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, at_a_time: int = REPACKED_ELEMENTS
) -> Int4Tiles:
    """Published words int32 [N, K / 8], scale bfloat16 or float16 [N, K / g], zero_point int32 [ceil(N / 8), K / g] ->
    tiles, with the scales as they are.

    Experts may be a dimension before the others. The extra memory beside the result is of so many elements
    `at_a_time`: 96 MiB. Raises ValueError where shapes do not fit together, or for groups that the kernels do not take.
    """
    *leading, rows, columns = packed.shape
    inputs = 8 * columns
    if scale.shape[:-1] != packed.shape[:-1] or not scale.shape[-1] or inputs % scale.shape[-1]:
        raise ValueError(f"scales {list(scale.shape)} do not fit INT4 weights of {rows} rows and {inputs} inputs")
    group = inputs // scale.shape[-1]
    if group not in INT4_GROUPS:
        raise ValueError(f"INT4 groups of {group} inputs: the kernels take {', '.join(map(str, INT4_GROUPS))}")
    if zero_point is not None and zero_point.shape != (*leading, -(-rows // 8), scale.shape[-1]):
        raise ValueError(f"zero points {list(zero_point.shape)} do not fit scales {list(scale.shape)}")
    tiles = int4_tiles(inputs)
    words = torch.empty((*leading, tiles, rows, PLANE_INPUTS), dtype=torch.int32, device=packed.device)
    most = max(1, at_a_time // (tiles * INT4_TILE_INPUTS))
    for source, target in zip(packed.view(-1, rows, columns), words.view(-1, *words.shape[-3:]), strict=True):
        for first in range(0, rows, most):
            _repack_rows(source[first : first + most].contiguous(), target[:, first : first + most])
    zeros = None
    if zero_point is not None:
        of_groups = _grouped(nibbles(zero_point.mT.contiguous())[..., :rows], tiles, group)  # of [K / g, N]
        pairs = functional.pad(of_groups, (0, 0, 0, of_groups.shape[-2] % 2))
        zeros = pairs[..., 0::2, :] | pairs[..., 1::2, :] << 4
    return Int4Tiles(words, _grouped(scale.mT, tiles, group), zeros, inputs)


def _repack_rows(packed: Tensor, words: Tensor) -> None:
    """packed int32 [n, K / 8] -> words [tiles, n, 32], a view to write."""
    tiles, rows, _ = words.shape
    elements = functional.pad(nibbles(packed), (0, tiles * INT4_TILE_INPUTS - 8 * packed.shape[1]))
    planes = elements.view(rows, tiles, PLANES, PLANE_INPUTS).permute(1, 0, 3, 2)
    words.copy_(packed_nibbles(planes).squeeze(-1))


def unpack_nibbles(packed: Tensor, into: Tensor, half: Tensor) -> None:
    """Nibbles 0..15 of int32 [..., n], least significant first, to `into` [..., n, 8], of any dtype. `half`: uint8
    [..., 4 n], overwritten."""
    octets = packed.view(torch.uint8)
    places = into.view(*octets.shape, 2)
    torch.bitwise_and(octets, 15, out=half)
    places[..., 0].copy_(half)
    torch.bitwise_right_shift(octets, 4, out=half)
    places[..., 1].copy_(half)


def nibbles(packed: Tensor) -> Tensor:
    """int32 [..., n], contiguous -> uint8 [..., 8 n]."""
    found = torch.empty((*packed.shape, 8), dtype=torch.uint8, device=packed.device)
    unpack_nibbles(packed, found, torch.empty_like(packed.view(torch.uint8)))
    return found.flatten(-2)


def packed_nibbles(values: Tensor) -> Tensor:
    """The reverse: uint8 [..., 8 n] of 0..15 -> int32 [..., n]."""
    return (values[..., 0::2] | values[..., 1::2] << 4).contiguous().view(torch.int32)


def _grouped(values: Tensor, tiles: int, group: int) -> Tensor:
    """[K / g, N] -> [tiles, 256 / g, N], zeros past the end."""
    groups = tiles * (INT4_TILE_INPUTS // group)
    padded = functional.pad(values, (0, 0, 0, groups - values.shape[-2]))
    return padded.reshape(*values.shape[:-2], tiles, -1, values.shape[-1]).contiguous()
