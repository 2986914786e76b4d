"""NVFP4 weights as the kernels read them, and how published ones are brought into that order.

Published (modelopt, compressed-tensors nvfp4-pack-quantized): two e2m1 elements in a byte, the first in its low half;
one e4m3 scale for 16 inputs; one float32 scale for the whole matrix, which here is one for each of its rows, since
matrices that are stacked have their own. Element = e2m1 * e4m3 * row scale; the product of the first two is exact in
bfloat16, and the third is applied to sums, in float32.

Ours: the inputs are cut into tiles of 256, tiles into planes of 32. Word 8 t + p of a row and tile, t < 4, has the
inputs of plane p that a lane t of a product has: nibble i of its low half is input 32 p + 8 i + 2 t, nibble i of its
high half the one behind it. So a lane reads its words of all planes together, each half of a word is a selector of
byte permutations, and the two halves give pairs of neighbours. Scales are bytes of five bits of exponent and three of
mantissa, in which e4m3's smallest ones are numbers like all others: as float32 a scale is (code << 20) + `SCALE_ZERO`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.model.weight_format import NVFP4_GROUP
from modelserve.sizing.weights.quantised_tiles import NVFP4_TILE_INPUTS, nvfp4_tiles

GROUPS = NVFP4_TILE_INPUTS // NVFP4_GROUP  # of a tile
PLANE_INPUTS, PLANES, LANES = 32, 8, 4
SCALE_EXPONENT = 10  # added to a scale's own, so that the smallest, 2^-9, has 1
SCALE_ZERO = (127 - SCALE_EXPONENT) << 23  # float32's bits of a scale whose code is 0
REPACKED_ELEMENTS = 1 << 25  # at a time: what bounds the extra memory of a repack, at three bytes an element


@dataclass(frozen=True, slots=True)
class Nvfp4Tiles:
    """A matrix of N rows and K inputs; experts put a dimension E before all others.

    words int32 [ceil(K / 256), N, 32]; scales uint8 [ceil(K / 256), 16, N]; row_scales float32 [N]. Inputs from K on
    are zero.
    """

    words: Tensor
    scales: Tensor
    row_scales: Tensor
    inputs: int

    @property
    def rows(self) -> int:
        return self.words.shape[-2]


def repack_nvfp4(packed: Tensor, scale: Tensor, row_scales: Tensor) -> Nvfp4Tiles:
    """Published bytes uint8 [N, K / 2], scale float8_e4m3fn [N, K / 16], row_scales float32 [N] -> tiles.

    Experts may be a dimension before the others. The extra memory beside the result is at most 128 MiB. Raises
    ValueError where shapes do not fit together. Scales must be numbers without sign, which whoever loads has tried.
    """
    *leading, rows, columns = packed.shape
    inputs = 2 * columns
    if (
        inputs % NVFP4_GROUP
        or scale.shape != (*leading, rows, inputs // NVFP4_GROUP)
        or row_scales.shape != (*leading, rows)
    ):
        raise ValueError(
            f"scales {list(scale.shape)} and {list(row_scales.shape)} do not fit NVFP4 weights of {rows} rows and "
            f"{inputs} inputs"
        )
    tiles = nvfp4_tiles(inputs)
    words = torch.empty((*leading, tiles, rows, PLANES * LANES), dtype=torch.int32, device=packed.device)
    scales = torch.empty((*leading, tiles, GROUPS, rows), dtype=torch.uint8, device=packed.device)
    octets = scale.view(torch.uint8) & 0x7F  # 0 may have a sign
    most = max(1, REPACKED_ELEMENTS // (tiles * NVFP4_TILE_INPUTS))
    of_experts = (t.view(-1, *t.shape[len(leading) :]) for t in (packed, octets, words, scales))
    for source, of_groups, words_to, scales_to in zip(*of_experts, strict=True):
        for first in range(0, rows, most):
            some = slice(first, first + most)
            _repack_rows(source[some], of_groups[some], words_to[:, some])
            codes = functional.pad(_scale_codes(of_groups[some]), (0, tiles * GROUPS - of_groups.shape[1]))
            scales_to[:, :, some] = codes.view(-1, tiles, GROUPS).permute(1, 2, 0)
    return Nvfp4Tiles(words, scales, row_scales.contiguous(), inputs)


def _repack_rows(packed: Tensor, scale: Tensor, words: Tensor) -> None:
    """packed uint8 [n, K / 2] -> words [tiles, n, 32], a view to write; elements whose scale is 0 are 0."""
    tiles, rows, _ = words.shape
    kept = packed * (scale != 0).repeat_interleave(NVFP4_GROUP // 2, dim=1)
    whole = functional.pad(kept, (0, tiles * NVFP4_TILE_INPUTS // 2 - packed.shape[1]))
    # Bytes [n, tiles, planes, pairs i, lanes t], each of neighbours -> of lanes and planes the nibbles of both halves.
    pairs = whole.view(rows, tiles, PLANES, 4, LANES).permute(1, 0, 4, 2, 3)
    first, second = pairs & 15, pairs >> 4
    low = [first[..., i] | first[..., i + 1] << 4 for i in (0, 2)]
    high = [second[..., i] | second[..., i + 1] << 4 for i in (0, 2)]
    octets = torch.stack((*low, *high), dim=-1)
    words.copy_(octets.view(torch.int32).view(tiles, rows, LANES * PLANES))


def _scale_codes(scale: Tensor) -> Tensor:
    """e4m3's bytes, without sign -> bytes of five bits of exponent and three of mantissa; 0 stays 0."""
    mantissa, exponent = scale & 7, scale >> 3
    normal = (exponent + SCALE_EXPONENT - 7 << 3) | mantissa
    # m * 2^-9, m from 1 to 7: 1 -> 2^-9; 2, 3 -> 2^-8 (1 + m / 2 - 1); 4 to 7 -> 2^-7 (1 + m / 4 - 1).
    table = torch.tensor([0, 8, 16, 20, 24, 26, 28, 30], dtype=torch.uint8, device=scale.device)
    return torch.where(exponent == 0, table[mantissa.long()], normal)
