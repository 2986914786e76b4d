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
CACHED_BYTES_FLOATS = 1 << 18  # where that is float32, seven times as much
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F  # of eight bytes, which are worked on together
_LOW_BITS = 0x0101010101010101
_LOW_PAIRS = 0x0303030303030303
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
        most = CACHED_BYTES if self._exact else CACHED_BYTES_FLOATS
        if raw.is_cuda:
            most = raw.numel() if self._exact else CACHED_BYTES
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
    """float32 [runs, n], written over -> int8 [runs, n] and float16 [runs, n / 32], as ggml rounds to Q8_0: halves away
    from zero."""
    groups = values.view(len(values), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
    # Of twice the steps, exactly, integers have the whole halves; one more half, of those that are not below zero, and
    # a shift rounds halves away from zero.
    halves = groups.mul_(torch.where(scales == 0, 0, 1 / scales).mul_(2)).to(torch.int16)
    whole = (halves >> 15).add_(halves).add_(1).bitwise_right_shift_(1)
    return whole.to(torch.int8).flatten(1), scales[..., 0].half()


def numbers(kind: BlockType, blocks: Tensor) -> Tensor:
    """uint8 [..., n, bytes] -> float32 [..., n, elements]."""
    if kind in _INTEGERS:
        return _INTEGERS[kind](blocks) * _half(blocks, 0).float()
    return _NUMBERS[kind](blocks)


def _half(blocks: Tensor, byte: int) -> Tensor:
    """float16 [..., 1] at a byte of each block."""
    return blocks[..., byte : byte + 2].contiguous().view(torch.float16)


def _octets(blocks: Tensor, first: int, last: int | None = None) -> Tensor:
    """A copy of some bytes of each block: int64 [..., bytes / 8]."""
    return blocks[..., first:last].clone(memory_format=torch.contiguous_format).view(torch.int64)


def _low_and_high(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Both nibbles of each byte, as bytes. The octets are written over."""
    return octets & _LOW_NIBBLES, octets.bitwise_right_shift_(4).bitwise_and_(_LOW_NIBBLES)


def _words(blocks: Tensor) -> Tensor:
    """Q4_0 -> int32 [..., 4]: nibble j of word w is element 8 w + j. Of eight bytes, two become one at a time."""
    halves = [
        half.bitwise_or_(half >> 4).view(torch.int16).to(torch.uint8).view(torch.int64)
        for half in _low_and_high(_octets(blocks, 2))
    ]
    return torch.cat(halves, dim=-1).view(torch.int32)


def _nibbles(octets: Tensor) -> Tensor:
    """int64 [..., n], written over -> uint8 [..., 16 n], all low halves before all high ones."""
    return torch.cat(_low_and_high(octets), dim=-1).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(_octets(blocks, 2)).view(torch.int8) - 8


def _spread(bits: Tensor, *, clear: int, set_to: int) -> Tensor:
    """uint8 [..., n] -> int64 [..., n]: a byte for each bit of a byte, the lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    of_bytes = torch.arange(256, dtype=torch.uint8, device=bits.device).unsqueeze(-1) >> places & 1
    table = of_bytes.mul_(set_to - clear & 255).add_(clear).view(torch.int64)[:, 0]
    return table.index_select(0, bits.flatten().int()).view(bits.shape)


def _q5_0(blocks: Tensor) -> Tensor:
    """A clear fifth bit is 16 less: the upper half of the byte in two's complement."""
    upper = _spread(blocks[..., 2:6], clear=0xF0, set_to=0)
    return torch.cat(_low_and_high(_octets(blocks, 6)), dim=-1).bitwise_or_(upper).view(torch.int8)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8)


_INTEGERS: dict[BlockType, Callable[[Tensor], Tensor]] = {Q4_0: _q4_0, Q5_0: _q5_0, Q8_0: _q8_0}


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(_octets(blocks, 4)).float().mul_(_half(blocks, 0).float()).add_(_half(blocks, 2).float())


def _q5_1(blocks: Tensor) -> Tensor:
    fifth = _spread(blocks[..., 4:8], clear=0, set_to=16)
    elements = torch.cat(_low_and_high(_octets(blocks, 8)), dim=-1).bitwise_or_(fifth).view(torch.uint8)
    return elements.float().mul_(_half(blocks, 0).float()).add_(_half(blocks, 2).float())


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _groups_of_nibbles(blocks, 16))


def _q5_k(blocks: Tensor) -> Tensor:
    octets = _octets(blocks, 16, 48)
    fifth = torch.stack([(octets >> place).bitwise_and_(_LOW_BITS) for place in range(8)], dim=-2)
    return _with_minima(blocks, fifth.bitwise_left_shift_(4).bitwise_or_(_groups_of_nibbles(blocks, 48)))


def _groups_of_nibbles(blocks: Tensor, first: int) -> Tensor:
    """Four times 32 bytes from `first` on -> bytes of eight groups of 32, as int64 [..., 8, 4]."""
    octets = _octets(blocks, first).view(*blocks.shape[:-1], 4, 4)
    return torch.stack(_low_and_high(octets), dim=-2).view(*blocks.shape[:-1], 8, 4)


def _with_minima(blocks: Tensor, elements: Tensor) -> Tensor:
    """Bytes, int64 [..., 8, 4], times factors, less minima, both of six bits in bytes 4 to 15: float32 [..., 256]."""
    low, middle, high = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    factors = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1) * _half(blocks, 0).float()
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=-1) * _half(blocks, 2).float()
    values = elements.view(torch.uint8).float()
    return values.mul_(factors.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    """Halves of 128 elements: 64 bytes of low nibbles, 32 of two high bits of four elements that lie 32 apart."""
    leading = blocks.shape[:-1]
    low, high = _low_and_high(_octets(blocks, 0, 128))  # half, elements 0-31 or 32-63 (low) and 64-127 (high), place
    nibbles = torch.stack((low.view(*leading, 2, 8), high.view(*leading, 2, 8)), dim=-2).view(*leading, 2, 4, 4)
    octets = _octets(blocks, 128, 192).view(*leading, 2, 4)
    pairs = torch.stack([(octets >> place).bitwise_and_(_LOW_PAIRS) for place in (0, 2, 4, 6)], dim=-2)
    elements = pairs.bitwise_left_shift_(4).bitwise_or_(nibbles).view(torch.uint8).view(*leading, 16, 16)
    scales = blocks[..., 192:208].view(torch.int8) * _half(blocks, 208).float()
    return elements.float().sub_(32).mul_(scales.unsqueeze(-1)).flatten(-2)


_NUMBERS: dict[BlockType, Callable[[Tensor], Tensor]] = {
    Q4_1: _q4_1, Q5_1: _q5_1, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k
}  # fmt: skip
