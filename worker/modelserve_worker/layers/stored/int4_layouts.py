"""Words of other tools' INT4 and INT8, brought into the order of compressed-tensors: along the inputs, row after row.

GPTQ's words are along the inputs as well, [inputs / 8, outputs]; its zero points are along the outputs, of version 1
less one. AWQ's are along the outputs, [inputs, outputs / 8], in an order of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelserve.model.weight_format import Layout

PACKED = 8  # int4 elements of an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble, the lowest first
ONES = 0x11111111  # one in each nibble
TURNED = 96, 64  # eights of inputs and columns of words at a time: 384 and 256 bytes side by side, 288 KiB in all
TURNED_WORDS_GPU = 1 << 24  # where each operation is a launch: 64 MiB, and as much beside
_STAGES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))  # of turning 8 x 8 nibbles: distance, nibbles that stay


def words_by_rows(words: Tensor, layout: Layout) -> Tensor:
    """int32 [..., inputs / 8, outputs] or AWQ's [..., inputs, outputs / 8] -> [..., outputs, inputs / 8]."""
    if layout is not Layout.AWQ:
        return transposed(words)
    *leading, inputs, columns = words.shape
    turned = torch.empty((*leading, columns * PACKED, inputs // PACKED), dtype=torch.int32, device=words.device)
    matrices = zip(words.view(-1, inputs, columns), turned.view(-1, *turned.shape[-2:]), strict=True)
    eights, width = (TURNED_WORDS_GPU // (PACKED * columns) or 1, columns) if words.is_cuda else TURNED
    for source, target in matrices:
        blocks = _operand(source.view(inputs // PACKED, PACKED, columns))
        places = _operand(target.view(columns, PACKED, inputs // PACKED))
        for first in range(0, columns, width):
            across = slice(first, first + width)
            for begin in range(0, inputs // PACKED, eights):
                along = slice(begin, begin + eights)
                planes = blocks[along, :, across].swapaxes(0, 1)
                planes = planes.contiguous() if words.is_cuda else planes.copy()
                _turn(planes)
                for nibble, output in enumerate(AWQ_ORDER):
                    places[across, output, along] = planes[nibble].T
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


def _operand(words: Tensor) -> Any:
    """The same memory for `_turn`: on the CPU as numpy's, whose shifts of 32 bits take half of PyTorch's time."""
    return words if words.is_cuda else words.detach().numpy().view(np.uint32)


def _turn(planes: Any) -> None:
    """int32 or uint32 [8, n, columns], side by side, in place: nibble j of plane i becomes nibble i of plane j.

    Shifts of negative words bring ones in from above, none of which a mask keeps.
    """
    kept = None if isinstance(planes, Tensor) else np.empty_like(planes[:4])  # no operation takes memory of its own
    for distance, staying in _STAGES:
        pairs = planes.reshape(4 // distance, 2, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        shift = 4 * distance
        moved = low >> shift if kept is None else np.right_shift(low, shift, out=kept.reshape(low.shape))
        moved ^= high
        moved &= staying
        high ^= moved
        moved <<= shift
        low ^= moved
