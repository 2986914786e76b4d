"""Tiles of the kernels for quantised linear layers, by format, rows and GPU: the data that a measurement changes.

`tests/bench/kernels/linear_speed.py` times these and others on the published models' shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.generations import tiles_for
from modelserve.sizing.backends.products import FP8_UNPACKED_ROWS
from modelserve.sizing.weights.quantised_tiles import DEQUANTISED_BLOCK_BYTES, SPLIT_SUM_BYTES

Format = Literal["int4", "int8", "fp8", "nvfp4"] | StoredType
GROUPED_ROWS = 4  # rows an expert has on average, up to which the few-row kernel multiplies
MOST_COUNTERS = 1 << 12
PARTS = (1, 2, 3, 4)  # of the inputs, where the sum of parts is taken later
_INT32 = 4


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Block of one program: `outputs` rows of the matrix times `rows` rows of inputs.

    Inputs are split while all blocks together are fewer than `programs`. `few`: the kernel for few rows.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    programs: int
    few: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """What a launch of a product is compiled with."""
        return {"BLOCK_N": self.outputs, "BLOCK_M": self.rows, "num_warps": self.warps, "num_stages": self.stages}

    def splits(self, *, rows: int, outputs: int, tiles: int) -> int:
        """Parts that `tiles` tiles of inputs are cut into, each of two tiles at least."""
        blocks = -(-rows // self.rows) * -(-outputs // self.outputs)
        return max(1, min(self.programs // blocks, tiles // 2))

    def parts(self, *, rows: int, experts: int) -> int:
        """Programs that share an expert's blocks of rows: as if every expert had twice its share of them."""
        return max(1, min(16, 2 * rows // (experts * self.rows)))


FEW_ROWS = FP8_UNPACKED_ROWS
MANY = 1 << 30  # rows: for all that no other tile is for
_FEW = {8: LinearTile(64, 8, 2, 3, 512, few=True), FEW_ROWS: LinearTile(64, 16, 2, 3, 512, few=True)}
_NVFP4 = {
    8: LinearTile(64, 8, 4, 3, 512), 16: LinearTile(64, 16, 4, 3, 512),
    64: LinearTile(64, 64, 4, 2, 264), MANY: LinearTile(64, 64, 4, 2, 264),
}  # fmt: skip
_FEW_INT4 = {**_FEW, 8: LinearTile(32, 8, 2, 3, 1536, few=True), 32: LinearTile(64, 32, 4, 3, 528)}
# By the places of `modelserve.sizing.backends.generations`.
_TILES: dict[str, tuple[dict[int, LinearTile], ...]] = {
    "int4": (
        {**_FEW_INT4, 64: LinearTile(128, 64, 8, 2, 264), MANY: LinearTile(128, 64, 8, 2, 264)},
        {**_FEW_INT4, 64: LinearTile(64, 64, 4, 2, 264), MANY: LinearTile(64, 64, 4, 2, 264)},
        {
            8: LinearTile(32, 8, 2, 3, 1536, few=True),
            FEW_ROWS: LinearTile(64, 16, 4, 4, 384, few=True),
            64: LinearTile(64, 64, 4, 3, 264),
            MANY: LinearTile(64, 64, 4, 3, 264),
        },
    ),
    "int8": (
        {**_FEW, 64: LinearTile(128, 64, 8, 3, 264), MANY: LinearTile(128, 64, 8, 3, 264)},
        {**_FEW, 64: LinearTile(64, 64, 4, 3, 264), MANY: LinearTile(64, 64, 4, 3, 264)},
        {
            8: LinearTile(128, 8, 4, 3, 384, few=True),
            FEW_ROWS: LinearTile(128, 16, 4, 3, 384, few=True),
            64: LinearTile(128, 64, 8, 3, 264),
            MANY: LinearTile(128, 64, 8, 3, 264),
        },
    ),
    "nvfp4": (_NVFP4, _NVFP4, _NVFP4),
    "fp8": (
        {**_FEW, 64: LinearTile(128, 64, 8, 3, 264), MANY: LinearTile(128, 64, 8, 3, 264)},
        {**_FEW, 64: LinearTile(64, 64, 4, 3, 264), MANY: LinearTile(64, 64, 4, 3, 264)},
        {
            8: LinearTile(128, 8, 4, 3, 384, few=True),
            FEW_ROWS: LinearTile(128, 16, 4, 3, 384, few=True),
            64: LinearTile(128, 64, 8, 3, 264),
            MANY: LinearTile(128, 128, 8, 2, 240),
        },
    ),
}


def tiles_of(fmt: Format, *, capability: int) -> dict[int, LinearTile]:
    """Tiles by the most rows they are for; `capability` is 10 * major + minor. Raises ValueError where GPUs of that
    capability are not known."""
    return tiles_for(_TILES[fmt], capability)


def linear_tile(fmt: Format, rows: int, *, capability: int) -> LinearTile:
    """The tile for a product of `rows` rows."""
    return next(tile for most, tile in tiles_of(fmt, capability=capability).items() if rows <= most)


def exact_tile(fmt: Format, *, capability: int) -> LinearTile:
    """The tile of the profile `exact`, for any number of rows: one program adds up an output."""
    return replace(tiles_of(fmt, capability=capability)[MANY], programs=0)


def grouped_tile(fmt: Format, rows: int, experts: int, capability: int) -> LinearTile:
    """The tile for `rows` rows dealt out to `experts` experts."""
    most = 8 if rows <= GROUPED_ROWS * experts else 64
    return tiles_of(fmt, capability=capability)[most]


def busy(items: int, at_once: int) -> float:
    """Share of the turns of `at_once` workers that have one of so many items."""
    return items / (-(-items // at_once) * at_once)


def empty_product(x: Tensor, outputs: int, parts: int) -> Tensor:
    """What a product of x [T, K] is written to: [T, outputs] in its dtype, or in parts float32 [parts, T, outputs]."""
    if parts == 1:
        return torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    return torch.empty((parts, x.shape[0], outputs), dtype=torch.float32, device=x.device)


class SplitSums(NamedTuple):
    """What programs with parts of one sum share: float32 parts, and int32 counters that are 0 between launches."""

    parts: Tensor
    arrivals: Tensor


class SharedBuffers:
    """What all products of one rank share on its device, since launches follow one another; each is made when it is
    first asked for, and kept. `block_bytes`: of the one that dequantised rows lie in."""

    def __init__(self, device: torch.device, *, block_bytes: int = DEQUANTISED_BLOCK_BYTES) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._named: dict[str, Tensor] = {}

    def named(self, name: str, count: int) -> Tensor:
        """uint8 [`count`] of the buffer of that name, on addresses that do not change while nobody asks for more."""
        if (found := self._named.get(name)) is None or found.numel() < count:
            found = self._named[name] = torch.empty(count, dtype=torch.uint8, device=self._device)
        return found[:count]

    @cached_property
    def split_sums(self) -> SplitSums:
        """SPLIT_SUM_BYTES together."""
        held = self.named("split_sums", SPLIT_SUM_BYTES)
        arrivals = held[-_INT32 * MOST_COUNTERS :].view(torch.int32)
        return SplitSums(held[: -arrivals.nbytes].view(torch.float32), arrivals.zero_())

    @cached_property
    def dequantised_block(self) -> Tensor:
        """bfloat16 [block_bytes / 2] that every product of many rows dequantises into, one after the other.

        It is kept: the allocator would cut a free block of this size up for others, and take a new one each time.
        """
        return self.named("dequantised_block", self._block_bytes).view(torch.bfloat16)
