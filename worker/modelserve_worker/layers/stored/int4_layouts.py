"""Words of other tools' INT4 and INT8, brought into the order of compressed-tensors: along the inputs, row after row.

GPTQ's words are along the inputs as well, [inputs / 8, outputs]; its zero points are along the outputs, of version 1
less one. AWQ's are along the outputs, [inputs, outputs / 8], in an order of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve.model.weight_format import Layout

PACKED = 8  # int4 elements of an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble, the lowest first
ONES = 0x11111111  # one in each nibble
TURNED_WORDS = 1 << 16  # at a time: what a core's cache holds
TURNED_WORDS_GPU = 1 << 24  # where each operation is a launch: 64 MiB, and as much beside
_STAGES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))  # of turning 8 x 8 nibbles: distance, nibbles that stay


def words_by_rows(words: Tensor, layout: Layout) -> Tensor:
    """int32 [..., inputs / 8, outputs] or AWQ's [..., inputs, outputs / 8] -> [..., outputs, inputs / 8]."""
    if layout is not Layout.AWQ:
        return transposed(words)
    *leading, inputs, columns = words.shape
    turned = torch.empty((*leading, columns * PACKED, inputs // PACKED), dtype=torch.int32, device=words.device)
    matrices = zip(words.view(-1, inputs, columns), turned.view(-1, *turned.shape[-2:]), strict=True)
    most = TURNED_WORDS_GPU if words.is_cuda else TURNED_WORDS
    eights = max(1, most // (PACKED * columns))
    for source, target in matrices:
        places = target.view(columns, PACKED, inputs // PACKED)
        for first in range(0, inputs // PACKED, eights):
            block = source[first * PACKED : (first + eights) * PACKED].view(-1, PACKED, columns).clone()
            _turn(block)
            for nibble, output in enumerate(AWQ_ORDER):
                places[:, output, first : first + eights].copy_(block[:, nibble].mT)
    return turned


def zero_points_by_rows(words: Tensor, layout: Layout) -> Tensor:
    """int32 [..., groups, outputs / 8] -> [..., outputs / 8, groups], the first output in the lowest nibble."""
    if layout is Layout.GPTQ:
        words = words + ONES  # of the whole word: a zero point of 0 was stored with a borrow
    if layout is Layout.AWQ:
        places = ((words >> 4 * nibble & 15) << 4 * output for nibble, output in enumerate(AWQ_ORDER))
        words = torch.stack(tuple(places)).sum(dim=0, dtype=torch.int32)
    return transposed(words)


def transposed(tensor: Tensor) -> Tensor:
    """[..., n, m] -> [..., m, n], with elements of a row side by side."""
    return torch.empty_like(tensor.mT, memory_format=torch.contiguous_format).copy_(tensor.mT)


def _turn(block: Tensor) -> None:
    """int32 [n, 8, columns], in place: nibble j of word i becomes nibble i of word j."""
    for distance, staying in _STAGES:
        pairs = block.view(block.shape[0], -1, 2, distance, block.shape[-1])
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        moved = (low >> 4 * distance).bitwise_xor_(high).bitwise_and_(staying)
        high.bitwise_xor_(moved)
        low.bitwise_xor_(moved.bitwise_left_shift_(4 * distance))
