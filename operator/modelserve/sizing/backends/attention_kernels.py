"""Which kernels attend: a row each, in the order in which they are preferred.

Hopper's kernels are for the shapes of the published models: heads of 256 columns in pages of 32 (sliding layers) and of
512 in pages of 64 (global ones), in profile fast. Its kernels of decodes take one row of a request: several, of a
decode with drafts, are Triton's, which read a request's keys once for them. Everything else that is in bfloat16 is
Triton's, too, and all of profile exact, whose splits follow from positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from modelserve.sizing.backends.attention import (
    DECODE_PARTS,
    DECODE_QUERIES,
    GLOBAL_WIDTH,
    PAIRS,
    SHARE_KEYS,
    SLIDING_WIDTH,
    STREAM_LEAST,
    STREAM_WARPS,
    AttentionShape,
    decode_stream_bytes,
    global_chunk_bytes,
    global_decode_bytes,
    most_decode_blocks,
    share_keys,
    sliding_chunk_bytes,
    sliding_decode_bytes,
)
from modelserve.sizing.backends.generations import HOPPER, tiles_for
from modelserve.sizing.backends.table import ANY_ROWS, AttentionTile, Backend, Choice, Operation, any_rows
from modelserve.sizing.pages import KVCacheDtype
from modelserve.sizing.rank_settings import Profile

_DECODES = Operation.DECODE_ATTENTION, Operation.VERIFY_ATTENTION

# By the places of `generations`. Of 64 rows of 512 columns Triton makes a mere trap for 10.0, whose matrix units keep
# sums in a memory that these fill. Chunks of the first two, where each warp multiplies for itself: four are faster than
# eight, of which some compute the same scores, though registers spill.
_TILES: dict[tuple[bool, str], tuple[AttentionTile, ...]] = {
    (False, "v_only"): (
        AttentionTile(16, 64, 4, 2, queries=16),
        AttentionTile(16, 64, 4, 2, queries=16),
        AttentionTile(16, 64, 4, 2),
        AttentionTile(16, 64, 4, 2, queries=16),
    ),
    (False, "kv"): (
        AttentionTile(16, 32, 4, 3),
        AttentionTile(16, 32, 4, 3, queries=32),
        AttentionTile(16, 32, 4, 3),
        AttentionTile(16, 32, 4, 3, queries=32),
    ),
    (False, "sliding"): (AttentionTile(16, 32, 4, 2), AttentionTile(16, 32, 4, 2), AttentionTile(16, 32, 4, 2)),
    (True, "v_only"): (
        AttentionTile(32, 32, 4, 2),
        AttentionTile(32, 32, 4, 2),
        AttentionTile(64, 64, 8, 2),
        AttentionTile(32, 32, 8, 2),
    ),
    (True, "kv"): (AttentionTile(32, 32, 4, 2), AttentionTile(32, 32, 4, 2), AttentionTile(64, 64, 8, 1)),
    (True, "sliding"): (AttentionTile(64, 32, 4, 2), AttentionTile(64, 32, 4, 2), AttentionTile(128, 32, 8, 3)),
}
# Of global layers of 512 columns in pages of 64; with K the tile is half of it.
_HOPPER_GLOBAL_CHUNK = AttentionTile(rows=128, keys=64, warps=12, stages=2)


@dataclass(frozen=True, slots=True)
class Attended:
    """What is to be attended to: layers of a shape, on a GPU of a capability (10 * major + minor), in a profile."""

    shape: AttentionShape
    capability: int
    profile: Profile = "fast"

    @property
    def hopper(self) -> bool:
        """Whether Hopper's kernels are asked at all."""
        return self.capability == HOPPER and self.profile == "fast"

    @property
    def hopper_decodes(self) -> bool:
        """Whether Hopper's kernels of decodes are: of rows as they are computed, and few queries of a KV head."""
        shape = self.shape
        return self.hopper and shape.dtype is KVCacheDtype.BFLOAT16 and shape.group <= DECODE_QUERIES

    def tile(self, *, chunks: bool) -> AttentionTile:
        """Of Triton's kernels."""
        shape = self.shape
        layout = "v_only" if shape.v_only else "sliding" if shape.window else "kv"
        tile = tiles_for(_TILES[chunks, layout], self.capability)
        narrow = self.capability == HOPPER and layout == "sliding" and shape.width == SLIDING_WIDTH
        if not chunks and narrow and shape.dtype is KVCacheDtype.BFLOAT16:
            tile = replace(tile, warps=2)
        return replace(tile, exact=self.profile == "exact")


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One row: a kernel that attends.

    `takes` (what is attended to) -> the most segments, or rows of chunks, ANY_ROWS, or 0 where it does not take them.
    `launch`: "module:function" that a worker calls, as `bound_kernels` has it. `kernels` (shape) -> all that one call
    launches. `tile` left out: Triton's for that shape. `splits`: results of parts of a row's keys go through the
    workspace. `most_keys` (shape): of chunks and the windows before them, where they have to fit the workspace.
    """

    operations: tuple[Operation, ...]
    backend: Backend
    launch: str
    takes: Callable[[Attended], int | None]
    kernels: Callable[[AttentionShape], tuple[str, ...]]
    shared_bytes: Callable[[AttentionShape], int] | None = None
    tile: AttentionTile | None = None
    splits: bool = False
    most_keys: Callable[[AttentionShape], int | None] | None = None

    def choice(self, asked: Attended, operation: Operation, most_rows: int | None) -> Choice:
        """The row as a choice of a table."""
        shape, chunks = asked.shape, operation not in _DECODES
        return Choice(
            operation,
            self.backend,
            self.kernels(shape),
            subject=shape.kind,
            format=shape.format,
            most_rows=most_rows,
            most_keys=None if self.most_keys is None else self.most_keys(shape),
            shared_bytes=None if self.shared_bytes is None else self.shared_bytes(shape),
            workspace_bytes=shape.expanded_bytes if operation is Operation.CHUNK_ATTENTION else 0,
            row_bytes=shape.split_bytes if self.splits else 0,
            launch=self.launch,
            tile=self.tile or asked.tile(chunks=chunks),
        )


def attention_choices(operation: Operation, asked: Attended) -> Iterator[Choice]:
    """Of one operation, up to the first that takes any number of rows and keys; none where the shape has no such."""
    for row in ATTENTION:
        if operation not in row.operations or (most := row.takes(asked)) == 0:
            continue
        choice = row.choice(asked, operation, most)
        yield choice
        if most is ANY_ROWS and choice.most_keys is None:
            return


def _sliding_rows(asked: Attended) -> int:
    shape = asked.shape
    if not _streams_window(asked) or share_keys(shape.window) > SHARE_KEYS:
        return 0
    return min(most_decode_blocks(shape.window) // DECODE_PARTS, STREAM_LEAST - 1) // shape.heads


def _streams_window(asked: Attended) -> bool:
    return asked.hopper_decodes and bool(asked.shape.window) and asked.shape.width == SLIDING_WIDTH


def _reads_values(asked: Attended) -> bool:
    shape = asked.shape
    return asked.hopper_decodes and shape.v_only and shape.width == GLOBAL_WIDTH and shape.pairs == PAIRS


def _streams_global(asked: Attended) -> bool:
    shape = asked.shape
    return asked.hopper_decodes and not shape.v_only and not shape.window and shape.width == GLOBAL_WIDTH


def _chunks(asked: Attended, width: int, *, sliding: bool) -> bool:
    shape = asked.shape
    fits = asked.hopper and shape.dtype is not KVCacheDtype.FLOAT32
    return fits and bool(shape.window) is sliding and shape.width == width


def _split(shape: AttentionShape) -> tuple[str, ...]:
    split = "split_decode_v_only" if shape.v_only else "split_decode"
    return f"{split}_packed" if shape.eight_bit else split, "combine"


def _expanding(shape: AttentionShape, kernel: str) -> tuple[str, ...]:
    return ("expand_keys", kernel) if shape.v_only or shape.eight_bit else (kernel,)


def _triton_chunk(shape: AttentionShape) -> tuple[str, ...]:
    if shape.window:
        return ("sliding_chunk",)
    return _expanding(shape, "global_chunk_v_only" if shape.v_only else "global_chunk")


_HOPPER, _TRITON = (
    "modelserve_worker.kernels.attention.hopper_launches:",
    "modelserve_worker.kernels.attention.triton_launches:",
)
_DECODE, _CHUNK = (Operation.DECODE_ATTENTION,), (Operation.CHUNK_ATTENTION,)

ATTENTION = [
    AttentionKernel(
        _DECODE, Backend.HOPPER, _HOPPER + "sliding_decode", _sliding_rows, lambda _: ("sliding_decode",),
        shared_bytes=lambda s: sliding_decode_bytes(s.window),
    ),
    AttentionKernel(
        _DECODE, Backend.HOPPER, _HOPPER + "sliding_stream", lambda a: any_rows(_streams_window(a)),
        lambda _: ("decode_stream",), splits=True,
        shared_bytes=lambda s: decode_stream_bytes(s.width, STREAM_WARPS[s.width]),
    ),
    AttentionKernel(
        _DECODE, Backend.HOPPER, _HOPPER + "v_only_decode", lambda a: any_rows(_reads_values(a)),
        lambda _: ("global_decode", "combine"), splits=True, shared_bytes=lambda _: global_decode_bytes(),
    ),
    AttentionKernel(
        _DECODE, Backend.HOPPER, _HOPPER + "global_stream", lambda a: any_rows(_streams_global(a)),
        lambda _: ("decode_stream", "combine"), splits=True,
        shared_bytes=lambda s: decode_stream_bytes(s.width, STREAM_WARPS[s.width]),
    ),
    AttentionKernel(
        _DECODES, Backend.TRITON, _TRITON + "decode_attention", lambda _: ANY_ROWS, _split, splits=True,
    ),
    AttentionKernel(
        _CHUNK, Backend.HOPPER, _HOPPER + "global_chunk",
        lambda a: any_rows(_chunks(a, GLOBAL_WIDTH, sliding=False)), lambda s: _expanding(s, "global_chunk"),
        shared_bytes=lambda s: global_chunk_bytes(key_plane=not s.v_only), tile=_HOPPER_GLOBAL_CHUNK,
    ),
    AttentionKernel(
        _CHUNK, Backend.HOPPER, _HOPPER + "sliding_chunk",
        lambda a: any_rows(_chunks(a, SLIDING_WIDTH, sliding=True)),
        lambda s: ("expand_window", "sliding_chunk") if s.eight_bit else ("sliding_chunk",),
        shared_bytes=lambda _: sliding_chunk_bytes(), most_keys=lambda s: s.scratch_keys if s.eight_bit else None,
    ),
    AttentionKernel(_CHUNK, Backend.TRITON, _TRITON + "chunk_attention", lambda _: ANY_ROWS, _triton_chunk),
    # Rows of images see what is behind them, which they do in sliding layers.
    AttentionKernel(
        (Operation.SPAN_ATTENTION,), Backend.TRITON, _TRITON + "chunk_attention",
        lambda a: any_rows(bool(a.shape.window)), _triton_chunk,
    ),
]  # fmt: skip
