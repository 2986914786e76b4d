"""The attention of a kind of layer on one rank, and the shared memory of Hopper's kernels that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.backends.generations import MULTIPROCESSOR_SHARED_BYTES, RESERVED_SHARED_BYTES
from modelserve.sizing.kernel_buffers import decode_splits, expanded_columns, expansion_keys, sliding_table_entries
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS, KVCacheDtype

SLIDING_WIDTH, GLOBAL_WIDTH = 256, 512  # columns of a head that Hopper's kernels are for
PAIRS = 64  # of columns that the rotation of global layers turns, likewise
DECODE_QUERIES = 8  # of a KV head: columns of a product
DECODE_PARTS = 8  # thread blocks that share a row's keys of one head in `sliding_decode`
DECODE_BLOCKS = 256  # in each place of the multiprocessors, so two turns: 2 rows of 31B, 4 of 26B-A4B
STREAM_WARPS = {SLIDING_WIDTH: 4, GLOBAL_WIDTH: 2}  # of `decode_stream`, by width: 16 keys each of a tile of K or V
STREAM_STAGES = 5
STREAM_LEAST = 64  # rows and heads from which on `decode_stream` keeps memory as busy as `sliding_decode`
SHARE_KEYS = 128  # most keys of a share: a tile of 16 for each of 8 warps
_FLOAT32, _ELEMENT = 4, 2  # bytes
_BARRIER = 8
_ITEM = 16  # of decodes, in shared memory: row, position, head, split
_WARPS = 8  # of `sliding_decode`


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one kind of layer on one rank: heads of KV, heads of queries, columns of a head.

    `window` 0: a global layer. `pairs`: that the rotation of a global layer turns. `scratch_keys`: keys of sliding
    layers that chunks have room to decode into, for rows of 8 bits.
    """

    heads: int
    query_heads: int
    width: int
    window: int
    dtype: KVCacheDtype
    v_only: bool
    pairs: int
    scratch_keys: int = 0
    expanded_bytes: int = 0  # of keys that chunks expand before they read them

    @classmethod
    def of(
        cls, architecture: ModelArchitecture, kind: LayerKind, *, dtype: KVCacheDtype, v_only: bool, ranks: int
    ) -> Self:
        """Of a model's layers of a kind; `v_only` of its global layers."""
        sliding = kind is LayerKind.SLIDING
        columns = expanded_columns(
            width=architecture.global_head_dim, pairs=architecture.global_rotary_pairs, dtype=dtype, v_only=v_only
        )
        elements = (
            expansion_keys(architecture.max_position_embeddings)
            * architecture.kv_heads_per_rank(LayerKind.GLOBAL, ranks)
            * columns
        )
        heads = architecture.kv_heads_per_rank(kind, ranks)
        width = architecture.head_dim if sliding else architecture.global_head_dim
        return cls(
            heads=heads,
            query_heads=architecture.num_attention_heads // ranks,
            width=width,
            window=architecture.sliding_window if sliding else 0,
            dtype=dtype,
            v_only=v_only and not sliding,
            pairs=0 if sliding else architecture.global_rotary_pairs,
            scratch_keys=elements // (2 * heads * width) if sliding else 0,
            expanded_bytes=0 if sliding else elements * _ELEMENT,
        )

    @property
    def kind(self) -> LayerKind:
        return LayerKind.SLIDING if self.window else LayerKind.GLOBAL

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.heads

    @property
    def eight_bit(self) -> bool:
        return self.dtype.element_bytes == 1

    @property
    def format(self) -> str:
        return f"v_only {self.dtype}" if self.v_only else str(self.dtype)

    @property
    def split_bytes(self) -> int:
        """float32 outputs, maxima and sums of the splits of one row."""
        splits = decode_splits(sliding_entries=sliding_table_entries(self.window), kv_heads=self.heads)
        return splits * self.query_heads * (self.width + 2) * _FLOAT32


def share_keys(window: int) -> int:
    """Keys of a share of `sliding_decode` at most: whole tiles of 16."""
    return -(-window // (16 * DECODE_PARTS)) * 16


def sliding_decode_bytes(window: int) -> int:
    """Shared memory of a thread block of `sliding_decode`: K and V of a share's octets; queries and weights; maxima,
    sums and outputs of tiles and shares; barriers."""
    keys = share_keys(window)
    rows = 2 * (keys + 8) * 2 * SLIDING_WIDTH
    operands = DECODE_QUERIES * (2 * SLIDING_WIDTH + 16 + 2 * keys + 16)
    floats = DECODE_QUERIES * (2 * _WARPS + 2 * DECODE_PARTS + SLIDING_WIDTH)
    return rows + operands + _FLOAT32 * floats + 3 * _BARRIER


def most_decode_blocks(window: int) -> int:
    """Thread blocks of `sliding_decode` behind which others keep memory as busy: DECODE_BLOCKS for each that share a
    multiprocessor."""
    return DECODE_BLOCKS * (MULTIPROCESSOR_SHARED_BYTES // (sliding_decode_bytes(window) + RESERVED_SHARED_BYTES))


def decode_stream_bytes(width: int, warps: int, stages: int = STREAM_STAGES) -> int:
    """Shared memory of a thread block of `decode_stream`: stages of 16 keys a warp with two barriers and an item each;
    outputs, maxima and sums of all warps."""
    floats = warps * DECODE_QUERIES * (width + 4 + 2)
    return stages * (2 * 16 * warps * width + 2 * _BARRIER + _ITEM) + _FLOAT32 * floats


def global_decode_bytes() -> int:
    """Shared memory of a thread block of `global_decode`: stages of 32 keys with two barriers and an item each, scores
    of four warps and where their results begin, and the cos and sin of a page's keys."""
    stages, tile, spacing, warps = 3, 32, 40, 4
    scores = (2 * DECODE_QUERIES * spacing + 1) * warps * _FLOAT32
    turns = GLOBAL_PAGE_TOKENS // 16 * PAIRS * 8
    return stages * (tile * GLOBAL_WIDTH * 2 + 2 * _BARRIER + _ITEM) + scores + turns


def global_chunk_bytes(*, key_plane: bool) -> int:
    """Shared memory of a thread block of `global_chunk`: queries, two tiles of V and of K or its turned columns, of
    weights where rows have K, maxima and sums of rows, barriers."""
    keys, other, barriers = (32, GLOBAL_WIDTH, 22) if key_plane else (64, 2 * PAIRS, 14)
    weights = 2 * 64 * 128 if key_plane else 0
    row_floats = 6 * 64 * _FLOAT32
    return 2 * (64 * GLOBAL_WIDTH + 2 * keys * (GLOBAL_WIDTH + other)) + weights + row_floats + barriers * _BARRIER


def sliding_chunk_bytes() -> int:
    """Shared memory of a thread block of `sliding_chunk`: four tiles of 64 keys, three of each warpgroup's queries,
    their barriers, and the descriptions of four blocks."""
    tile, tiles, queries, rows, fields = 64, 4, 3, 128, 18
    barriers = (2 * tiles + 3 * queries) * _BARRIER
    return 2 * SLIDING_WIDTH * (tiles * tile + queries * rows // 2) + barriers + 4 * fields * 4
