"""Tiles of the attention kernels by kind of layer and GPU, and the launches that the compile checks look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from modelserve.sizing.backends.attention import (
    PAIRS,
    SLIDING_WIDTH,
    AttentionShape,
    chunk_choices,
    decode_choices,
)
from modelserve.sizing.backends.generations import HOPPER, tiles_for
from modelserve.sizing.backends.table import Backend, Choice, KernelTable, Operation
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels.paged_layout import LayerRows

Door = Literal["decode", "chunk"]


@dataclass(frozen=True)
class Tile:
    """Shape of one kernel on one kind of layer. `rows`: query rows of a block; `keys`: keys of a tile; `queries`: of a
    decode kernel's program, those that registers and shared memory hold at most.

    `hopper`: where the table of kernels names it, the kernel is not Triton's but that of `chunk_attention_sm90`,
    `sliding_attention_sm90`, `global_decode_sm90`, `sliding_decode_sm90` of at most `most_segments` or
    `decode_stream_sm90` of more. `exact`: as the profile of that name has it.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    hopper: bool = False
    queries: int = 64
    most_segments: int = 0
    exact: bool = False


# By the places of `modelserve.sizing.backends.generations`. Of 64 rows of 512 columns Triton makes a mere trap for
# 10.0, whose matrix units keep sums in a memory that these fill. Chunks of the first two, where each warp
# multiplies for itself: four are faster than eight, of which some compute the same scores, though registers spill.
_TILES: dict[tuple[Door, str], tuple[Tile, ...]] = {
    ("decode", "v_only"): (
        Tile(16, 64, 4, 2, queries=16),
        Tile(16, 64, 4, 2, queries=16),
        Tile(16, 64, 4, 2),
        Tile(16, 64, 4, 2, queries=16),
    ),
    ("decode", "kv"): (
        Tile(16, 32, 4, 3),
        Tile(16, 32, 4, 3, queries=32),
        Tile(16, 32, 4, 3),
        Tile(16, 32, 4, 3, queries=32),
    ),
    ("decode", "sliding"): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    ("chunk", "v_only"): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    ("chunk", "kv"): (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 64, 8, 1)),
    ("chunk", "sliding"): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(128, 32, 8, 3)),
}
# Global layers of 512 columns in pages of 64; with K the tile is half of it.
_HOPPER_CHUNK = Tile(rows=128, keys=64, warps=12, stages=2, hopper=True)
# Sliding layers of 256 columns in pages of 32; what Triton's kernel takes where decoded rows have no room.
_HOPPER_SLIDING_CHUNK = Tile(rows=128, keys=32, warps=8, stages=3, hopper=True)
# Those of bfloat16 rows, whose decodes Triton's kernel takes where requests have several rows.
_HOPPER_SLIDING_DECODE = replace(_TILES["decode", "sliding"][-1], warps=2)


def tiles_of(table: KernelTable, rows: LayerRows) -> tuple[Tile, Tile]:
    """Those of decode and of chunk attention on layers of this layout. Raises KeyError for a table of another model."""
    assert table.capability is not None
    decode, chunk = (
        table.of(operation, rows.kind) for operation in (Operation.DECODE_ATTENTION, Operation.CHUNK_ATTENTION)
    )
    tiles = _tile("decode", decode, rows, table.capability), _tile("chunk", chunk, rows, table.capability)
    if table.profile == "exact":
        return replace(tiles[0], exact=True), replace(tiles[1], exact=True)
    return tiles


def tile_for(rows: LayerRows, *, door: Door, capability: int, query_heads: int, pairs: int = PAIRS) -> Tile:
    """The tile of a door on layers of this layout by themselves, whatever model they are of. Raises
    UnknownGenerationError where GPUs of that capability are not known."""
    shape = AttentionShape(
        rows.heads, query_heads, rows.width, rows.window, rows.dtype, rows.v_only, 0 if rows.window else pairs
    )
    choices = (decode_choices if door == "decode" else chunk_choices)(shape, capability)
    return _tile(door, tuple(choices), rows, capability)


def _tile(door: Door, choices: tuple[Choice, ...], rows: LayerRows, capability: int) -> Tile:
    first, layout = choices[0], "v_only" if rows.v_only else "sliding" if rows.entries else "kv"
    hopper = first.backend is Backend.HOPPER
    if hopper and door == "chunk":
        return _HOPPER_SLIDING_CHUNK if rows.entries else _HOPPER_CHUNK
    tile = tiles_for(_TILES[door, layout], capability)
    if door == "decode" and capability == HOPPER and rows.entries and rows.width == SLIDING_WIDTH:
        tile = _HOPPER_SLIDING_DECODE if rows.dtype is KVCacheDtype.BFLOAT16 else tile
    few = (choice.most_rows or 0 for choice in choices if "sliding_decode" in choice.kernels)
    return replace(tile, hopper=hopper, most_segments=next(few, 0))


def query_block(tile: Tile, rows: int, group: int) -> tuple[int, int]:
    """How many of a segment's rows a program of a decode kernel takes, of `group` queries each, and the rows of its
    matrix products."""
    part = min(rows, max(1, tile.queries // group))
    return part, max(16, 1 << (part * group - 1).bit_length())


def decode_warps(tile: Tile, block: int) -> int:
    """Warps of a program of `block` queries: a warp has at most as many accumulators as a lone row's program gives it,
    up to 8 warps."""
    return min(8, tile.warps * block // 16) if block > 16 else tile.warps


# What kernels call a format. A constant that is named as one of Triton's types comes back from a launch's description,
# from which kernels are compiled ahead, as that type and no longer equals its name.
FORMAT_NAMES = {"int8": "scaled_int8"}
