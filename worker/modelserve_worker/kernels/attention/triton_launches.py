"""Launches of Triton's attention kernels: layout arguments by layer, tiles and buffers of the caller.

Arrays of the step, tables and rotations are read before the kernel before is complete (`dependent_launch`): whoever
calls has them written before the step's embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import AttentionTile
from modelserve.sizing.kernel_buffers import SLIDING_SPLIT_PAGES, decode_splits, expanded_columns
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.attention.tiles import FORMAT_NAMES, decode_warps, query_block
from modelserve_worker.kernels.attention.triton import chunk_attention_triton as chunk_kernels
from modelserve_worker.kernels.attention.triton import decode_attention_triton as decode_kernels
from modelserve_worker.kernels.attention.triton import expand_keys_triton as expand_kernels
from modelserve_worker.kernels.attention.triton import packed_decode_triton as packed_kernels
from modelserve_worker.kernels.attention.triton import prepare_triton as prepare_kernels
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import Segments, Step

EIGHT_BIT = frozenset({KVCacheDtype.INT8, KVCacheDtype.FP8_E4M3, KVCacheDtype.FP8_E5M2})


@dataclass(frozen=True)
class Rotation:
    """cos and sin of global layers for keys derived from values: float32 [tiles, pairs] and [keys of a tile, pairs].

    `packed`: the even pairs come before the odd ones, as the kernels of 8-bit rows read them.
    """

    start_cos: Tensor
    start_sin: Tensor
    turn_cos: Tensor
    turn_sin: Tensor
    packed: bool

    @property
    def pairs(self) -> int:
        return self.turn_cos.shape[1]

    @property
    def turns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels take them."""
        return self.start_cos, self.start_sin, self.turn_cos, self.turn_sin


def tile_rotation(inverse_frequencies: Tensor, *, pairs: int, keys: int, longest: int, dtype: KVCacheDtype) -> Rotation:
    """Tables for tiles of `keys` keys up to position `longest`; angles in float64, so that long contexts keep them."""
    frequencies = inverse_frequencies[:pairs].double()
    if dtype in EIGHT_BIT:
        frequencies = torch.cat((frequencies[::2], frequencies[1::2]))
    starts = (
        torch.arange(0, longest + keys, keys, dtype=torch.float64, device=frequencies.device)[:, None] * frequencies
    )
    turns = torch.arange(keys, dtype=torch.float64, device=frequencies.device)[:, None] * frequencies
    tables = (starts.cos().float(), starts.sin().float(), turns.cos().float(), turns.sin().float())
    return Rotation(*tables, packed=dtype in EIGHT_BIT)


def element_dtype(rows: LayerRows) -> torch.dtype:
    """Element type of stored rows; fp8 ones are typed uint8 and told apart in the kernels."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}.get(rows.dtype.value, torch.uint8)


def decode_workspace(rows: LayerRows, *, query_heads: int) -> int:
    """float32 words that one decode row needs: an output, a maximum and a sum per split and query head."""
    return most_splits(rows) * query_heads * (rows.width + 2)


def page_arguments(
    rows: LayerRows, arena: Tensor, *, packed: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...], str]:
    """(arena as elements and as float16, the eight layout numbers of the kernels, FORMAT).

    `packed`: an element is a pair of 8-bit ones.
    """
    dtype = torch.int16 if packed else element_dtype(rows)
    size = dtype.itemsize
    k, v = rows.offsets.get("k", 0), rows.offsets["v"]
    scales = (rows.offsets.get("k_scale", 0), rows.offsets.get("v_scale", 0))
    numbers = (
        rows.origin // size, rows.page_stride // size, k // size, v // size,
        rows.origin // 2, rows.page_stride // 2, scales[0] // 2, scales[1] // 2,
    )  # fmt: skip
    return (arena.view(dtype), arena.view(torch.float16)), numbers, FORMAT_NAMES.get(rows.dtype.value, rows.dtype.value)


GLOBAL_SPLIT_PAGES = 2  # at least 128 keys a split, as SLIDING_SPLIT_PAGES of half the length
ALONE = 132  # programs, at most, that have a multiprocessor each
FEW_RESULTS = 1 << 16  # numbers of decodes' outputs up to which twice as many programs combine them
PER_WARP = 2048  # numbers that a warp combines: 64 a thread, which sums them without another warp


def most_splits(rows: LayerRows) -> int:
    return decode_splits(sliding_entries=rows.entries, kv_heads=rows.heads)


@dataclass(frozen=True, slots=True)
class Splits:
    """Results of parts of rows' keys, as `combine` reads them: float32 outputs [.., most, Hq, D], maxima and sums
    [.., most, Hq] by row of the step. A part has at least `pages` pages."""

    outputs: Tensor
    maxima: Tensor
    sums: Tensor
    most: int
    pages: int

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.outputs, self.maxima, self.sums


def splits_in(workspace: Tensor, rows: LayerRows, *, query_heads: int, pages: int) -> Splits:
    """The whole workspace, cut by row of the step, of which there are fewer than segments times their most rows."""
    most, width = most_splits(rows), rows.width
    parts = workspace.numel() // decode_workspace(rows, query_heads=query_heads) * most * query_heads
    outputs, maxima, sums, _ = workspace.tensor_split((parts * width, parts * (width + 1), parts * (width + 2)))
    return Splits(outputs, maxima, sums, most, pages)


def combine(
    splits: Splits,
    output: Tensor,
    decode: Segments,
    *,
    rows: LayerRows,
    tile: AttentionTile,
    pairs: int = 0,
    whole: bool = False,
    most_together: int | None = None,
) -> None:
    """The sum over its splits of each row of few-row segments -> rows of `output` [T, Hq, D]. `whole`: rows that are
    not split are there already. `most_together`: splits that are read at a time where there are many rows."""
    count, few, heads, width = decode.slots.numel(), decode.most_rows, output.shape[1], output.shape[2]
    together, many = triton.next_power_of_2(splits.most), count * few * heads * width > FEW_RESULTS
    if many and most_together is not None:
        together = min(together, most_together)
    columns = min(width, 128 if many or tile.exact else 64)
    launch(
        decode_kernels.combine, (count * few, heads, width // columns),
        *splits.parts, decode.starts, decode.lengths, decode.rows, output, splits.pages,
        PAIRS=pairs, WINDOW=rows.window, SPLITS=together, COLUMNS=columns, WHOLE=whole,
        KV_HEADS=rows.heads, GROUP=heads // rows.heads, D=width, ROWS=few,
        PAGE=rows.page_tokens, MOST_SPLITS=splits.most,
        num_warps=min(4, max(1, together * columns // PER_WARP)),
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    workspace: Tensor,
    tile: AttentionTile,
    key_weight: Tensor | None = None,
    rotation: Rotation | None = None,
    beside: bool = False,
) -> None:
    """Rows of the few-row segments of q [T, Hq, D] over pages -> the same rows of `output`. `workspace` is float32,
    `decode_workspace` words for each of the rows up to the last of these.

    `beside`: the kernel launched before is one of chunks that `chunk_attention` said others may run beside.
    """
    decode = step.decode
    assert decode is not None
    heads, width, count, few = q.shape[1], q.shape[2], decode.slots.numel(), decode.most_rows
    group = heads // rows.heads
    packed = rows.dtype in EIGHT_BIT
    (elements, scales), numbers, fmt = page_arguments(rows, arena, packed=packed)
    least = SLIDING_SPLIT_PAGES if rows.entries else GLOBAL_SPLIT_PAGES
    splits = splits_in(workspace, rows, query_heads=heads, pages=least)
    shape = {"KV_HEADS": rows.heads, "GROUP": group, "D": width, "ROWS": few}
    split = {"PAGE": rows.page_tokens, "MOST_SPLITS": splits.most, "SPLIT_PAGES": least}
    part, block = query_block(tile, few, group)
    tiled = {
        "TILE": tile.keys,
        **({"FORMAT": fmt} if packed else {}),
        "BLOCK_M": block,
        "PART": part,
        "BESIDE": beside,
        "num_warps": decode_warps(tile, block),
        "num_stages": tile.stages,
    }
    common = (
        q, *splits.parts, decode.slots, decode.starts, decode.lengths, decode.rows, table, table.stride(0),
        elements, scales, *numbers,
    )  # fmt: skip
    grid = (rows.heads * -(-few // part), splits.most, count)
    if rows.v_only:
        assert rotation is not None
        assert key_weight is not None
        assert rotation.packed is packed
        assert rotation.turn_cos.shape[0] == tile.keys, "the rotation tables were made for tiles of another length"
        v_only = packed_kernels.split_decode_v_only_packed if packed else decode_kernels.split_decode_v_only
        # Unpacking binds a program that has a multiprocessor to itself.
        if packed and math.prod(grid) <= ALONE and not tile.exact:
            tiled["num_warps"] = max(2 * tile.warps, decode_warps(tile, block))
        launch(v_only, grid, *common, key_weight, *rotation.turns, PAIRS=rotation.pairs, **shape, **split, **tiled)
    else:
        kernel = packed_kernels.split_decode_packed if packed else decode_kernels.split_decode
        launch(kernel, grid, *common, ENTRIES=rows.entries, WINDOW=rows.window, **shape, **split, **tiled)
    combine(splits, output, decode, rows=rows, tile=tile, pairs=turned_pairs(rows, rotation))


def turned_pairs(rows: LayerRows, rotation: Rotation | None) -> int:
    """Pairs of columns that V-only rows come turned by, 0 of others."""
    return rotation.pairs if rows.v_only and rotation is not None else 0


def scratch_per_key(rows: LayerRows, *, pairs: int) -> int:
    """Elements of the compute dtype that `chunk_attention` of a global layer needs per key of the chunks' contexts."""
    return rows.heads * expanded_columns(width=rows.width, pairs=pairs, dtype=rows.dtype, v_only=rows.v_only)


def chunk_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    tile: AttentionTile,
    fresh: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    key_weight: Tensor | None = None,
    scratch: Tensor | None = None,
    inverse_frequencies: Tensor | None = None,
    pairs: int = 0,
) -> bool:
    """Rows of all chunks of q [T, Hq, D] -> the same rows of `output`. Returns whether attention of the step's decodes
    may run beside the last of the kernels, which then lets it start only when all before the chunks is complete: not
    beside these.

    `fresh`: the step buffers of a sliding layer. `scratch`, of a global layer that needs one: flat, of q's dtype, with
    `scratch_per_key` elements for each of the keys that `Segments.key_rows` counts (whole pages).
    `pairs`: rotated pairs of V-only rows; `inverse_frequencies` float32 [>= pairs] are theirs.
    """
    chunks = step.chunks
    assert chunks is not None
    heads, width = q.shape[1], q.shape[2]
    shared = {
        "CHUNKS": chunks.rows.numel(), "KV_HEADS": rows.heads, "GROUP": heads // rows.heads, "D": width,
        "PAGE": rows.page_tokens, "TILE": tile.keys, "BLOCK_M": tile.rows,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    described = described_chunks(chunks)
    if rows.kind is LayerKind.SLIDING:
        assert fresh is not None
        (elements, scales), numbers, fmt = page_arguments(rows, arena)
        launch(
            chunk_kernels.sliding_chunk, (chunks.most_sliding_blocks, rows.heads),
            q, output, *fresh, *described, chunks.sliding_blocks, table, table.stride(0), elements, scales, *numbers,
            step.last_keys, ENTRIES=rows.entries, WINDOW=rows.window, FORMAT=fmt, **shared,
        )  # fmt: skip
        return False
    passes = expanded_passes(
        q, step, rows=rows, table=table, arena=arena, key_weight=key_weight, scratch=scratch,
        inverse_frequencies=inverse_frequencies, pairs=pairs,
    )  # fmt: skip
    for group, keys in passes:
        common = (
            q, output, *described, group.blocks, table, table.stride(0), keys.elements, keys.scales, *keys.layout,
            group.key_rows,
        )  # fmt: skip
        grid = (group.most_blocks, rows.heads)
        if rows.v_only:
            launch(chunk_kernels.global_chunk_v_only, grid, *common, scratch, PAIRS=pairs, DENSE=keys.dense, **shared)
        else:
            launch(chunk_kernels.global_chunk, grid, *common, DENSE=keys.dense, **shared)
    return False


@dataclass(frozen=True, slots=True)
class PassKeys:
    """Where kernels of global chunks read V, and K where rows have it: elements of pages, or, `dense`, of the scratch,
    page behind page. `layout`: the eight numbers of kernels."""

    elements: Tensor
    scales: Tensor
    layout: tuple[int, ...]
    dense: bool


def expanded_passes(
    q: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    key_weight: Tensor | None,
    scratch: Tensor | None,
    inverse_frequencies: Tensor | None,
    pairs: int,
) -> Iterator[tuple[Segments, PassKeys]]:
    """Passes of a step's chunks through a global layer, each once its keys are expanded, as far as they have to be."""
    chunks = step.chunks
    assert chunks is not None
    (elements, scales), layout, fmt = page_arguments(rows, arena)
    dense, per_key = rows.dtype in EIGHT_BIT, scratch_per_key(rows, pairs=pairs)
    if not per_key:
        yield from ((group, PassKeys(elements, scales, layout, dense)) for group in step.passes)
        return
    assert scratch is not None
    assert scratch.dtype == q.dtype
    assert not rows.v_only or (key_weight is not None and inverse_frequencies is not None)
    pages, width = (table, table.stride(0), elements, scales, *layout), q.shape[2]
    keys = scratch.numel() // (per_key * rows.page_tokens) * rows.page_tokens
    decoded = scratch
    read = PassKeys(elements, scales, layout, dense)
    if dense:
        decoded = scratch[keys * rows.heads * 2 * pairs if rows.v_only else 0 :]
        plane, planes = rows.heads * rows.page_tokens * width, 1 if rows.v_only else 2
        read = PassKeys(decoded, scales, (0, planes * plane, 0, (planes - 1) * plane, 0, 0, 0, 0), dense)
    for group in step.passes:
        launch(
            expand_kernels.expand_keys, (group.most_pages, rows.heads),
            scratch, decoded, group.key_rows, *described_chunks(chunks)[1:], group.pages, *pages, key_weight,
            inverse_frequencies,
            CHUNKS=chunks.rows.numel(), KV_HEADS=rows.heads, D=width, PAIRS=pairs if rows.v_only else 0,
            PAGE=rows.page_tokens, FORMAT=fmt, COLUMNS=min(width, 128), num_warps=4,
        )  # fmt: skip
        yield group, read


def described_chunks(chunks: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns of chunks, as kernels take them."""
    return chunks.rows, chunks.starts, chunks.lengths, chunks.slots


def prepare(
    projected: Tensor,
    q: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: tuple[Tensor, Tensor],
    fresh: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    eps: float,
    pairs: int = 0,
) -> None:
    """projected [T, columns] -> q [T, Hq, D], and the step's rows in pages or in the step buffers `fresh`.

    `projected` holds query, key and value heads, or without the last where V is the key projection, or queries alone
    where the layer reads another's rows. `k_weight`: of the norm of those rows' keys. `rotation`: cos and sin, float32
    [T, D / 2]. `pairs`: rotated pairs of V-only rows, whose queries come out in the order of the rows.
    """
    tokens, q_heads, width = q.shape
    (elements, scales), numbers, fmt = page_arguments(rows, arena)
    kv_heads = rows.heads if projected.shape[1] > q_heads * width else 0
    stored_heads = kv_heads if rows.v_only else 2 * kv_heads
    per_program = min(4, kv_heads or q_heads)
    buffers = fresh if fresh is not None else (elements, elements, scales, scales)
    launch(
        prepare_kernels.prepare, (tokens, (q_heads + stored_heads) // per_program),
        projected, projected.stride(0), q, q_weight, k_weight, *rotation,
        step.sliding_slots if rows.entries else step.global_slots, step.positions, table, table.stride(0),
        elements, scales, *buffers, *numbers, eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=width, HEADS=per_program, PAGE=rows.page_tokens, ENTRIES=rows.entries,
        PAIRS=pairs if rows.v_only else 0, V_IS_K=projected.shape[1] < (q_heads + 2 * kv_heads) * width,
        BUFFERED=fresh is not None, FORMAT=fmt, num_warps=max(1, min(4, per_program * width // 512)),
    )  # fmt: skip


def commit(
    fresh: tuple[Tensor, Tensor, Tensor, Tensor],
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
) -> None:
    """Step-buffer rows that outlive the step -> their sliding pages."""
    (elements, scales), numbers, _ = page_arguments(rows, arena)
    heads = triton.next_power_of_2(rows.heads)
    launch(
        prepare_kernels.commit, (step.commit_slots.numel(),),
        *fresh, step.commit_slots, step.positions, table, table.stride(0), elements, scales, *numbers,
        KV_HEADS=rows.heads, HEADS=heads, D=rows.width, PAGE=rows.page_tokens, ENTRIES=rows.entries, INT8=rows.int8,
        num_warps=8 if heads * rows.width >= 4096 else 4,
    )  # fmt: skip
