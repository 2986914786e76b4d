"""Blocks of a GGUF file as the elements and scales of a matrix, or as numbers.

A block holds its scale, float16, among its elements, so that both parameters of a quantised matrix are read at once:
Q4_0 keeps elements 0 to 15 of 32 in the low halves of its bytes and 16 to 31 in the high ones, with 8 added, Q5_0 adds
a word of fifth bits, Q8_0 has bytes; Q4_1 and Q5_1 add a minimum. K-quants have 256 elements: Q4_K and Q5_K eight
groups with a factor and a minimum of six bits each, Q6_K sixteen with a factor. These are the layouts of
`ggml-common.h`; tests compare them with the `gguf` package, and what is rounded once more with its Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.model.gguf.block_types import (
    BLOCK_TYPES,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockType,
)

GROUP = 32  # elements that share a scale
PACKED = 8  # nibbles of a word
CACHED_BYTES = 1 << 19  # of a file at a time: what is made of them on the way stays in a core's cache, and is small
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_LARGEST = 127  # of int8
BLOCKS_BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.elements > 1}


@dataclass(frozen=True, slots=True)
class BlockTargets:
    """Where the blocks of one piece go: `elements` [runs, ...], and `scales` [runs, groups] where they are apart.

    Elements are int32 words of nibbles, int8, or floats, which the scales are multiplied into. Of each run the first
    `skip` elements, and what the targets have no room for, belong to another rank.
    """

    kind: BlockType
    elements: Tensor
    scales: Tensor | None
    skip: int = 0

    def store(self, raw: Tensor) -> None:
        """raw uint8 [runs, bytes], whole blocks, on the device of the targets."""
        blocks = raw.reshape(raw.shape[0], -1, self.kind.bytes)
        runs, count = blocks.shape[:2]
        most = raw.numel() if raw.is_cuda and self._exact else CACHED_BYTES
        step = max(1, most // (count * self.kind.bytes))
        width = count if runs > 1 else min(count, max(1, most // self.kind.bytes))
        for run in range(0, runs, step):
            for first in range(0, count, width):
                self._store(blocks[run : run + step, first : first + width], run, first)

    @property
    def _exact(self) -> bool:
        """Whether what is made on the way is small: no floats."""
        return self.scales is not None and self.kind in _INTEGERS

    def _store(self, blocks: Tensor, run: int, first: int) -> None:
        """Blocks from `first` on of the runs from `run` on."""
        begin, end = first * self.kind.elements, (first + blocks.shape[1]) * self.kind.elements
        share = elements_in(self.elements)
        low, high = max(begin, self.skip), min(end, self.skip + self.elements.shape[1] * share)
        for target, held in zip((self.elements, self.scales), self._held(blocks), strict=True):
            if target is None or held is None or low >= high:
                continue
            of_each = (end - begin) // held.shape[1]
            found = held[:, (low - begin) // of_each : (high - begin) // of_each]
            target[run : run + len(held), (low - self.skip) // of_each : (high - self.skip) // of_each].copy_(found)

    def _held(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Elements [runs, ...] and scales [runs, groups] as the targets have them."""
        if self.scales is None:
            return numbers(self.kind, blocks).flatten(1), None
        if not self._exact:
            return _rounded(numbers(self.kind, blocks).flatten(1))
        elements = _words(blocks) if self.elements.dtype is torch.int32 else _INTEGERS[self.kind](blocks)
        return elements.flatten(1), _half(blocks, 0)[..., 0]


def elements_in(parameter: Tensor) -> int:
    """Elements of a matrix in one of a parameter."""
    return PACKED if parameter.dtype is torch.int32 else 1


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [runs, n] -> int8 [runs, n] and float16 [runs, n / 32], as ggml rounds to Q8_0: halves away from zero."""
    groups = values.view(len(values), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
    steps = groups * torch.where(scales == 0, 0, 1 / scales)
    sizes = steps.abs()
    floors = sizes.floor()
    whole = floors.add_(sizes.sub_(floors).mul_(2).floor_()).copysign_(steps)
    return whole.to(torch.int8).flatten(1), scales[..., 0].half()


def numbers(kind: BlockType, blocks: Tensor) -> Tensor:
    """uint8 [..., n, bytes] -> float32 [..., n, elements]."""
    if kind in _INTEGERS:
        return _INTEGERS[kind](blocks) * _half(blocks, 0).float()
    return _NUMBERS[kind](blocks)


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
    return _fifth_bits(blocks[..., 2:6], blocks[..., 6:]).view(torch.int8) - 16


def _fifth_bits(octets: Tensor, nibbles: Tensor) -> Tensor:
    """uint8 [..., 32] of their four low bits and of the bit for each."""
    bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1
    return _nibbles(nibbles) | (bits.flatten(-2) << 4)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8)


_INTEGERS: dict[BlockType, Callable[[Tensor], Tensor]] = {Q4_0: _q4_0, Q5_0: _q5_0, Q8_0: _q8_0}


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0).float() * _nibbles(blocks[..., 4:]) + _half(blocks, 2).float()


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0).float() * _fifth_bits(blocks[..., 4:8], blocks[..., 8:]) + _half(blocks, 2).float()


def _q4_k(blocks: Tensor) -> Tensor:
    octets = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _with_minima(blocks, _nibbles(octets).reshape(*blocks.shape[:-1], 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    leading = blocks.shape[:-1]
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> places) & 1
    octets = blocks[..., 48:].reshape(*leading, 4, 32)
    return _with_minima(blocks, _nibbles(octets).reshape(*leading, 8, 32) | (fifth << 4))


def _with_minima(blocks: Tensor, elements: Tensor) -> Tensor:
    """uint8 [..., 8, 32] times factors, less minima, both of six bits in bytes 4 to 15: [..., 256]."""
    low, middle, high = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    factors = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1) * _half(blocks, 0).float()
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=-1) * _half(blocks, 2).float()
    return (factors.unsqueeze(-1) * elements - minima.unsqueeze(-1)).flatten(-2)


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


_NUMBERS: dict[BlockType, Callable[[Tensor], Tensor]] = {
    Q4_1: _q4_1, Q5_1: _q5_1, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k
}  # fmt: skip
