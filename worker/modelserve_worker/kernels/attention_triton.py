"""Launching the attention kernels: tiles by kind of layer, layout arguments by layer, buffers of the caller.

Arrays of the step, tables and rotations are read before the kernel before is complete (`dependent_launch`): whoever
calls has them written before the step's embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve.sizing.kernel_buffers import SLIDING_SPLIT_PAGES, decode_splits, expanded_columns
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels import chunk_attention_sm90 as hopper_kernels
from modelserve_worker.kernels import chunk_attention_triton as chunk_kernels
from modelserve_worker.kernels import decode_attention_triton as decode_kernels
from modelserve_worker.kernels import decode_stream_sm90 as hopper_stream
from modelserve_worker.kernels import expand_keys_triton as expand_kernels
from modelserve_worker.kernels import global_decode_sm90 as hopper_global
from modelserve_worker.kernels import packed_decode_triton as packed_kernels
from modelserve_worker.kernels import prepare_triton as prepare_kernels
from modelserve_worker.kernels import sliding_attention_sm90 as hopper_sliding
from modelserve_worker.kernels import sliding_decode_sm90 as hopper_decode
from modelserve_worker.kernels.attention_tiles import FORMAT_NAMES, Tile, decode_warps, query_block, tile_for
from modelserve_worker.kernels.dependent_launch import launch
from modelserve_worker.kernels.paged_layout import LayerRows
from modelserve_worker.kernels.step import Segments, Step

__all__ = [
    "Rotation", "Tile", "chunk_attention", "commit", "decode_attention", "prepare", "scratch_per_key", "tile_for",
    "tile_rotation",
]  # fmt: skip

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
# Of Hopper's kernels, whose blocks go from split to split: the longer, the less of results passes through memory.
LONG_SPLITS = ((120, 16), (33, 8), (24, 4))  # rows and heads for each 132 blocks, from so many on, and pages
BESIDE_PAGES = 8  # of a step with chunks, whose arrays have room for many more decodes than there are
TOGETHER = 16  # splits that `combine` reads at a time of many rows, most of which have no more


ALONE = 132  # programs, at most, that have a multiprocessor each
FEW_RESULTS = 1 << 16  # numbers of decodes' outputs up to which twice as many programs combine them
PER_WARP = 2048  # numbers that a warp combines: 64 a thread, which sums them without another warp


def most_splits(rows: LayerRows) -> int:
    return decode_splits(sliding_entries=rows.entries, kv_heads=rows.heads)


def split_pages(pairs: int, places: int, *, beside: bool) -> int:
    """Pages of a split at least, of so many rows and KV heads, by kernels of `places` blocks a multiprocessor."""
    pages = next((pages for least, pages in LONG_SPLITS if pairs >= least * places), GLOBAL_SPLIT_PAGES)
    return min(pages, BESIDE_PAGES) if beside else pages


def decode_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    workspace: Tensor,
    tile: Tile,
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
    hopper = tile.hopper and few == 1  # its kernels attend for one row of a request
    if hopper and rows.entries:
        if count <= tile.most_segments:
            hopper_decode.sliding_decode(q, output, decode, rows=rows, table=table, arena=arena)
        else:
            hopper_stream.decode_stream(q, output, decode, rows=rows, table=table, arena=arena, beside=beside)
        return
    group = heads // rows.heads
    packed = rows.dtype in EIGHT_BIT
    (elements, scales), numbers, fmt = page_arguments(rows, arena, packed=packed)
    most = most_splits(rows)
    # By row of the step, of which there are fewer than segments times their most rows.
    parts = workspace.numel() // decode_workspace(rows, query_heads=heads) * most * heads
    partial, maxima, sums, _ = workspace.tensor_split((parts * width, parts * (width + 1), parts * (width + 2)))
    least = SLIDING_SPLIT_PAGES if rows.entries else GLOBAL_SPLIT_PAGES
    if hopper:
        least = split_pages(count * rows.heads, 2 if rows.v_only else 1, beside=beside)
    splitting = {"PAGE": rows.page_tokens, "MOST_SPLITS": most}
    split = {**splitting, "SPLIT_PAGES": least}
    shape = {"KV_HEADS": rows.heads, "GROUP": group, "D": width, "ROWS": few}
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
        q,
        partial,
        maxima,
        sums,
        decode.slots,
        decode.starts,
        decode.lengths,
        decode.rows,
        table,
        table.stride(0),
        elements,
        scales,
        *numbers,
    )
    grid = (rows.heads * -(-few // part), most, count)
    if rows.v_only:
        assert rotation is not None
        assert key_weight is not None
        assert rotation.packed is packed
        assert rotation.turn_cos.shape[0] == tile.keys, "the rotation tables were made for tiles of another length"
        turns = (rotation.start_cos, rotation.start_sin, rotation.turn_cos, rotation.turn_sin)
        v_only = packed_kernels.split_decode_v_only_packed if packed else decode_kernels.split_decode_v_only
        # Unpacking binds a program that has a multiprocessor to itself.
        if packed and math.prod(grid) <= ALONE and not tile.exact:
            tiled["num_warps"] = max(2 * tile.warps, decode_warps(tile, block))
        if hopper:
            hopper_global.split_decode(
                q, output, (partial, maxima, sums), decode, rows=rows, table=table, arena=arena, key_weight=key_weight,
                turns=turns, most_splits=most, split_pages=least, beside=beside,
            )  # fmt: skip
        else:
            launch(v_only, grid, *common, key_weight, *turns, PAIRS=rotation.pairs, **shape, **split, **tiled)
    else:
        kernel = packed_kernels.split_decode_packed if packed else decode_kernels.split_decode
        if hopper:
            hopper_stream.decode_stream(
                q, output, decode, rows=rows, table=table, arena=arena, parts=(partial, maxima, sums),
                most_splits=most, split_pages=least, beside=beside,
            )  # fmt: skip
        else:
            launch(kernel, grid, *common, ENTRIES=rows.entries, WINDOW=rows.window, **shape, **split, **tiled)
    splits, many = triton.next_power_of_2(most), count * few * heads * width > FEW_RESULTS
    if hopper and many:
        splits = min(splits, TOGETHER)
    columns = min(width, 128 if many or tile.exact else 64)
    launch(
        decode_kernels.combine, (count * few, heads, width // columns),
        partial, maxima, sums, decode.starts, decode.lengths, decode.rows, output, least,
        PAIRS=rotation.pairs if rows.v_only and rotation is not None else 0, WINDOW=rows.window,
        SPLITS=splits, COLUMNS=columns, WHOLE=hopper, **shape, **splitting,
        num_warps=min(4, max(1, splits * columns // PER_WARP)),
    )  # fmt: skip


def scratch_per_key(rows: LayerRows, *, pairs: int) -> int:
    """Elements of the compute dtype that `chunk_attention` of a global layer needs per key of the chunks' contexts."""
    return rows.heads * expanded_columns(width=rows.width, pairs=pairs, dtype=rows.dtype, v_only=rows.v_only)


def _decoded_window(
    scratch: Tensor | None, chunks: Segments, *, rows: LayerRows, tokens: int
) -> tuple[Tensor, Tensor] | None:
    """K and V [keys, heads, D] of a step's rows and of the window before each chunk, if `scratch` has room."""
    shape = tokens + chunks.most * (rows.window - 1), rows.heads, rows.width
    plane = math.prod(shape)
    if scratch is None or scratch.numel() < 2 * plane:
        return None
    return scratch[:plane].view(shape), scratch[plane : 2 * plane].view(shape)


def chunk_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    tile: Tile,
    fresh: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    key_weight: Tensor | None = None,
    scratch: Tensor | None = None,
    inverse_frequencies: Tensor | None = None,
    pairs: int = 0,
) -> bool:
    """Rows of all chunks of q [T, Hq, D] -> the same rows of `output`. Returns whether attention of the step's decodes
    may run beside the last of the kernels, which then lets it start only when all before the chunks is complete.
    A step with `last_keys` takes Triton's kernel in sliding layers on every GPU.

    `fresh`: the step buffers of a sliding layer. `scratch`, of a global layer that needs one: flat, of q's dtype, with
    `scratch_per_key` elements for each of the keys that `Segments.key_rows` counts (whole pages). A sliding layer of
    8-bit rows decodes them there, on Hopper, if they fit.
    `pairs`: rotated pairs of V-only rows; `inverse_frequencies` float32 [>= pairs] are theirs.
    """
    chunks = step.chunks
    assert chunks is not None
    heads, width = q.shape[1], q.shape[2]
    (elements, scales), numbers, fmt = page_arguments(rows, arena)
    shared = {
        "CHUNKS": chunks.rows.numel(), "KV_HEADS": rows.heads, "GROUP": heads // rows.heads, "D": width,
        "PAGE": rows.page_tokens, "TILE": tile.keys, "BLOCK_M": tile.rows,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    described = (chunks.rows, chunks.starts, chunks.lengths, chunks.slots)
    pages = (table, table.stride(0), elements, scales, *numbers)
    if rows.kind is LayerKind.SLIDING:
        assert fresh is not None
        hopper = tile.hopper and step.last_keys is None
        if hopper and rows.dtype not in EIGHT_BIT:
            hopper_sliding.sliding_chunk(q, output, step, rows=rows, fresh=fresh[:2], table=table, arena=arena)
            return True
        room = _decoded_window(scratch, chunks, rows=rows, tokens=q.shape[0]) if hopper else None
        if room is not None:
            programs = max(rows.entries, -(-q.shape[0] // rows.page_tokens))
            launch(
                expand_kernels.expand_window, (programs, rows.heads, 2),
                *room, *fresh, *described, chunks.sliding_blocks, *pages,
                CHUNKS=chunks.rows.numel(), KV_HEADS=rows.heads, D=width, PAGE=rows.page_tokens,
                ENTRIES=rows.entries, WINDOW=rows.window, FORMAT=fmt, COLUMNS=min(width, 128), num_warps=4,
            )  # fmt: skip
            hopper_sliding.sliding_chunk(q, output, step, rows=rows, fresh=room, table=table, arena=None)
            return True
        launch(
            chunk_kernels.sliding_chunk, (chunks.most_sliding_blocks, rows.heads),
            q, output, *fresh, *described, chunks.sliding_blocks, *pages, step.last_keys,
            ENTRIES=rows.entries, WINDOW=rows.window, FORMAT=fmt, **shared,
        )  # fmt: skip
        return False
    dense = rows.dtype in EIGHT_BIT
    per_key = scratch_per_key(rows, pairs=pairs)
    decoded, stored, layout = scratch, elements, numbers
    if per_key:
        assert scratch is not None
        assert scratch.dtype == q.dtype
        assert not rows.v_only or (key_weight is not None and inverse_frequencies is not None)
        keys = scratch.numel() // (per_key * rows.page_tokens) * rows.page_tokens
        if dense:
            decoded = stored = scratch[keys * rows.heads * 2 * pairs if rows.v_only else 0 :]
            plane, planes = rows.heads * rows.page_tokens * width, 1 if rows.v_only else 2
            layout = (0, planes * plane, 0, (planes - 1) * plane, 0, 0, 0, 0)
    for group in step.passes:
        if per_key:
            launch(
                expand_kernels.expand_keys, (group.most_pages, rows.heads),
                scratch, decoded, group.key_rows, *described[1:], group.pages, *pages, key_weight, inverse_frequencies,
                CHUNKS=chunks.rows.numel(), KV_HEADS=rows.heads, D=width, PAIRS=pairs if rows.v_only else 0,
                PAGE=rows.page_tokens, FORMAT=fmt, COLUMNS=min(width, 128), num_warps=4,
            )  # fmt: skip
        if tile.hopper:
            read = hopper_kernels.Pages(stored, layout, None if dense else table, scratch if rows.v_only else None)
            hopper_kernels.global_chunk(q, output, chunks, group, pages=read, kv_heads=rows.heads)
            continue
        common = (q, output, *described, group.blocks, table, table.stride(0), stored, scales, *layout, group.key_rows)
        grid = (group.most_blocks, rows.heads)
        if rows.v_only:
            launch(chunk_kernels.global_chunk_v_only, grid, *common, scratch, PAIRS=pairs, DENSE=dense, **shared)
        else:
            launch(chunk_kernels.global_chunk, grid, *common, DENSE=dense, **shared)
    return tile.hopper


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
