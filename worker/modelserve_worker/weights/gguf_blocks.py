"""Blocks of a GGUF file as the elements and scales of a matrix, or as numbers.

A block holds its scale, float16, before its elements, so that both parameters of a quantised matrix are read at once:
Q4_0 keeps elements 0 to 15 of 32 in the low halves of its bytes and 16 to 31 in the high ones, with 8 added, Q5_0 adds
a word of fifth bits, Q8_0 has bytes. Q6_K has 16 groups of 16, each with a factor of eight bits to the block's scale.
These are the layouts of `ggml-common.h`; tests compare them with the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.model.gguf.block_types import BLOCK_TYPES, Q4_0, Q5_0, Q6_K, Q8_0, BlockType

WORDS = 4  # of eight nibbles, in a block of 32
CACHED_BYTES = 1 << 19  # of a file at a time, so that what is made of them on the way stays in a core's cache
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
BLOCKS_BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.elements > 1}


@dataclass(frozen=True, slots=True)
class BlockTargets:
    """Where the blocks of one piece go: `elements` [runs, ...], and `scales` [runs, blocks] where they are apart.

    Elements are int32 words of nibbles, int8, or floats, which the scales are multiplied into.
    """

    kind: BlockType
    elements: Tensor
    scales: Tensor | None

    def store(self, raw: Tensor) -> None:
        """raw uint8 [runs, bytes], whole blocks, on the device of the targets."""
        blocks = raw.reshape(raw.shape[0], -1, self.kind.bytes)
        dim, items = (0, 1) if len(blocks) > 1 else (1, items_per_block(self.elements, self.kind))
        step = max(1, CACHED_BYTES // (blocks[0].numel() if dim == 0 else self.kind.bytes))
        for first in range(0, blocks.shape[dim], step):
            part = blocks.narrow(dim, first, min(step, blocks.shape[dim] - first))
            elements = self.elements.narrow(dim, first * items, part.shape[dim] * items)
            elements.copy_(self._elements(part).flatten(1))
            if self.scales is not None:
                self.scales.narrow(dim, first, part.shape[dim]).copy_(_half(part, 0)[..., 0])

    def _elements(self, blocks: Tensor) -> Tensor:
        if self.scales is None:
            return numbers(self.kind, blocks)
        if self.elements.dtype is torch.int32:
            assert self.kind is Q4_0
            return _words(blocks)
        return _INTEGERS[self.kind](blocks)


def items_per_block(elements: Tensor, kind: BlockType) -> int:
    """Elements of a parameter that hold one block."""
    return WORDS if elements.dtype is torch.int32 else kind.elements


def numbers(kind: BlockType, blocks: Tensor) -> Tensor:
    """uint8 [..., n, bytes] -> float32 [..., n, elements]."""
    if kind is Q6_K:
        return _q6_k(blocks)
    return _INTEGERS[kind](blocks) * _half(blocks, 0).float()


def _half(blocks: Tensor, byte: int) -> Tensor:
    """float16 [..., 1] at a byte of each block."""
    return blocks[..., byte : byte + 2].contiguous().view(torch.float16)


def _words(blocks: Tensor) -> Tensor:
    """Q4_0 -> int32 [..., 4]: nibble j of word w is element 8 w + j. Eight bytes at a time, of which two become one."""
    octets = blocks[..., 2:].clone(memory_format=torch.contiguous_format).view(torch.int64)
    low = octets & _LOW_NIBBLES
    high = octets.bitwise_right_shift_(4).bitwise_and_(_LOW_NIBBLES)
    halves = [half.bitwise_or_(half >> 4).view(torch.int16).to(torch.uint8).view(torch.int64) for half in (low, high)]
    return torch.cat(halves, dim=-1).view(torch.int32)


def _nibbles(octets: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n], all low halves before all high ones."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 2:]).view(torch.int8) - 8


def _q5_0(blocks: Tensor) -> Tensor:
    octets = blocks[..., 2:6].unsqueeze(-1)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1
    return (_nibbles(blocks[..., 6:]) | (bits.flatten(-2) << 4)).view(torch.int8) - 16


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8)


_INTEGERS: dict[BlockType, Callable[[Tensor], Tensor]] = {Q4_0: _q4_0, Q5_0: _q5_0, Q8_0: _q8_0}


def _q6_k(blocks: Tensor) -> Tensor:
    """Halves of 128 elements: 64 bytes of low nibbles, 32 of two high bits of four elements that lie 32 apart."""
    leading = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*leading, 2, 2, 32)  # half, elements 0-31 or 32-63 (low) and 64-127 (high), place
    high = blocks[..., 128:192].reshape(*leading, 2, 32)
    quarters = [
        (low[..., 0, :] & 15) | ((high & 3) << 4),
        (low[..., 1, :] & 15) | (((high >> 2) & 3) << 4),
        (low[..., 0, :] >> 4) | (((high >> 4) & 3) << 4),
        (low[..., 1, :] >> 4) | ((high >> 6) << 4),
    ]
    elements = torch.stack(quarters, dim=-2).flatten(-3).view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8) * _half(blocks, 208).float()
    return (elements.view(*leading, 16, 16) * scales.unsqueeze(-1)).flatten(-2)
