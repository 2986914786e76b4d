"""Launches of Hopper's attention kernels, with those of Triton's that expand keys before them and combine behind them.

They take what Triton's of `attention_triton` take, and compute the same.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from modelserve.sizing.backends.table import AttentionTile
from modelserve_worker.kernels.attention.hopper import decode_stream_sm90, global_chunk_sm90, v_only_decode_sm90
from modelserve_worker.kernels.attention.hopper import sliding_chunk_sm90 as sliding_chunks
from modelserve_worker.kernels.attention.hopper import sliding_decode_sm90 as sliding_decodes
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.attention.triton import expand_keys_triton as expand_kernels
from modelserve_worker.kernels.attention.triton_launches import (
    EIGHT_BIT,
    GLOBAL_SPLIT_PAGES,
    Rotation,
    Splits,
    combine,
    described_chunks,
    expanded_passes,
    page_arguments,
    splits_in,
)
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import Segments, Step

# Of kernels whose blocks go from split to split: the longer, the less of results passes through memory.
LONG_SPLITS = ((120, 16), (33, 8), (24, 4))  # rows and heads for each 132 blocks, from so many on, and pages
BESIDE_PAGES = 8  # of a step with chunks, whose arrays have room for many more decodes than there are
TOGETHER = 16  # splits that `combine` reads at a time of many rows, most of which have no more


def split_pages(pairs: int, places: int, *, beside: bool) -> int:
    """Pages of a split at least, of so many rows and KV heads, by kernels of `places` blocks a multiprocessor."""
    pages = next((pages for least, pages in LONG_SPLITS if pairs >= least * places), GLOBAL_SPLIT_PAGES)
    return min(pages, BESIDE_PAGES) if beside else pages


def sliding_decode(
    q: Tensor, output: Tensor, step: Step, *, rows: LayerRows, table: Tensor, arena: Tensor, **_others: Any
) -> None:
    """Few decodes of one row in sliding layers. They start when all before them is complete."""
    assert step.decode is not None
    sliding_decodes.sliding_decode(q, output, step.decode, rows=rows, table=table, arena=arena)


def sliding_stream(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    beside: bool,
    **_others: Any,
) -> None:
    """Many decodes of one row in sliding layers."""
    assert step.decode is not None
    decode_stream_sm90.decode_stream(q, output, step.decode, rows=rows, table=table, arena=arena, beside=beside)


def v_only_decode(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    workspace: Tensor,
    tile: AttentionTile,
    key_weight: Tensor,
    rotation: Rotation,
    beside: bool,
) -> None:
    """Decodes of one row in global layers that store V alone."""
    assert step.decode is not None
    assert not rotation.packed
    assert rotation.turn_cos.shape[0] == tile.keys, "the rotation tables were made for tiles of another length"
    splits = _splits(workspace, step.decode, rows, query_heads=q.shape[1], places=2, beside=beside)
    v_only_decode_sm90.split_decode(
        q, output, splits.parts, step.decode, rows=rows, table=table, arena=arena, key_weight=key_weight,
        turns=rotation.turns, most_splits=splits.most, split_pages=splits.pages, beside=beside,
    )  # fmt: skip
    combine(splits, output, step.decode, rows=rows, tile=tile, pairs=rotation.pairs, whole=True, most_together=TOGETHER)


def global_stream(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    workspace: Tensor,
    tile: AttentionTile,
    beside: bool,
    **_others: Any,
) -> None:
    """Decodes of one row in global layers that store K and V."""
    assert step.decode is not None
    splits = _splits(workspace, step.decode, rows, query_heads=q.shape[1], places=1, beside=beside)
    decode_stream_sm90.decode_stream(
        q, output, step.decode, rows=rows, table=table, arena=arena, parts=splits.parts, most_splits=splits.most,
        split_pages=splits.pages, beside=beside,
    )  # fmt: skip
    combine(splits, output, step.decode, rows=rows, tile=tile, whole=True, most_together=TOGETHER)


def sliding_chunk(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    fresh: tuple[Tensor, Tensor, Tensor, Tensor],
    scratch: Tensor | None,
    **_others: Any,
) -> bool:
    """Chunks in sliding layers; rows of 8 bits, and those of the windows before, are decoded into `scratch` first.
    Returns True: decodes may run beside."""
    chunks = step.chunks
    assert chunks is not None
    if rows.dtype not in EIGHT_BIT:
        sliding_chunks.sliding_chunk(q, output, step, rows=rows, fresh=fresh[:2], table=table, arena=arena)
        return True
    assert scratch is not None
    (elements, scales), numbers, fmt = page_arguments(rows, arena)
    shape = chunks.window_keys(q.shape[0], rows.window), rows.heads, rows.width
    plane = math.prod(shape)
    room = scratch[:plane].view(shape), scratch[plane : 2 * plane].view(shape)
    launch(
        expand_kernels.expand_window, (max(rows.entries, -(-q.shape[0] // rows.page_tokens)), rows.heads, 2),
        *room, *fresh, *described_chunks(chunks), chunks.sliding_blocks, table, table.stride(0), elements, scales,
        *numbers, CHUNKS=chunks.rows.numel(), KV_HEADS=rows.heads, D=rows.width, PAGE=rows.page_tokens,
        ENTRIES=rows.entries, WINDOW=rows.window, FORMAT=fmt, COLUMNS=min(rows.width, 128), num_warps=4,
    )  # fmt: skip
    sliding_chunks.sliding_chunk(q, output, step, rows=rows, fresh=room, table=table, arena=None)
    return True


def global_chunk(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    key_weight: Tensor | None,
    scratch: Tensor | None,
    inverse_frequencies: Tensor | None,
    pairs: int,
    **_others: Any,
) -> bool:
    """Chunks in global layers. Returns True: decodes may run beside."""
    assert step.chunks is not None
    passes = expanded_passes(
        q, step, rows=rows, table=table, arena=arena, key_weight=key_weight, scratch=scratch,
        inverse_frequencies=inverse_frequencies, pairs=pairs,
    )  # fmt: skip
    for group, keys in passes:
        turned = scratch if rows.v_only else None
        pages = global_chunk_sm90.Pages(keys.elements, keys.layout, None if keys.dense else table, turned)
        global_chunk_sm90.global_chunk(q, output, step.chunks, group, pages=pages, kv_heads=rows.heads)
    return True


def _splits(
    workspace: Tensor, decode: Segments, rows: LayerRows, *, query_heads: int, places: int, beside: bool
) -> Splits:
    pages = split_pages(decode.slots.numel() * rows.heads, places, beside=beside)
    return splits_in(workspace, rows, query_heads=query_heads, pages=pages)
