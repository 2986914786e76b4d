"""Launches of Hopper's attention kernels, with those of Triton's that expand keys before them and combine behind them.

They take what Triton's of `triton_launches` take, and compute the same.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from modelserve.sizing.backends.table import AttentionTile
from modelserve_worker.kernels.attention.arguments import EIGHT_BIT, LayerPages, StepRows, Turns
from modelserve_worker.kernels.attention.hopper import decode_stream_sm90, global_chunk_sm90, v_only_decode_sm90
from modelserve_worker.kernels.attention.hopper import sliding_chunk_sm90 as sliding_chunks
from modelserve_worker.kernels.attention.hopper import sliding_decode_sm90 as sliding_decodes
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.attention.triton import expand_keys_triton as expand_kernels
from modelserve_worker.kernels.attention.triton_launches import (
    GLOBAL_SPLIT_PAGES,
    combine,
    expanded_passes,
    splits_in,
)
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import Segments, Step

# Of kernels whose blocks go from split to split: the longer, the less of results passes through memory.
LONG_SPLITS = ((120, 16), (33, 8), (24, 4))  # rows and heads for each 132 blocks, from so many on, and pages
BESIDE_PAGES = 8  # of a step with chunks, whose arrays have room for many more decodes than there are
TOGETHER = 16  # splits that `combine` reads at a time of many rows, most of which have no more


def sliding_decode(q: Tensor, output: Tensor, step: Step, *, pages: LayerPages, **_others: Any) -> None:
    """Few decodes of one row in sliding layers. They start when all before them is complete."""
    assert step.decode is not None
    sliding_decodes.sliding_decode(q, output, step.decode, pages=pages)


def sliding_stream(q: Tensor, output: Tensor, step: Step, *, pages: LayerPages, beside: bool, **_others: Any) -> None:
    """Many decodes of one row in sliding layers."""
    assert step.decode is not None
    decode_stream_sm90.decode_stream(q, output, step.decode, pages=pages, beside=beside)


def v_only_decode(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    workspace: Tensor,
    tile: AttentionTile,
    key_weight: Tensor,
    turns: Turns,
    beside: bool,
) -> None:
    """Decodes of one row in global layers that store V alone."""
    decode, rows = step.decode, pages.rows
    assert decode is not None
    assert turns.turn_cos.shape[0] == tile.keys, "the rotation tables were made for tiles of another length"
    splits, least = splits_in(workspace, rows, query_heads=q.shape[1]), split_pages(decode, rows, 2, beside=beside)
    v_only_decode_sm90.split_decode(
        q, output, splits, decode, pages=pages, key_weight=key_weight, turns=turns, split_pages=least, beside=beside
    )
    combine(
        splits, output, decode, rows=rows, tile=tile, split_pages=least, pairs=turns.turn_cos.shape[1], whole=True,
        most_together=TOGETHER,
    )  # fmt: skip


def global_stream(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    workspace: Tensor,
    tile: AttentionTile,
    beside: bool,
    **_others: Any,
) -> None:
    """Decodes of one row in global layers that store K and V."""
    decode, rows = step.decode, pages.rows
    assert decode is not None
    splits, least = splits_in(workspace, rows, query_heads=q.shape[1]), split_pages(decode, rows, 1, beside=beside)
    decode_stream_sm90.decode_stream(q, output, decode, pages=pages, splits=splits, split_pages=least, beside=beside)
    combine(splits, output, decode, rows=rows, tile=tile, split_pages=least, whole=True, most_together=TOGETHER)


def sliding_chunk(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    fresh: StepRows,
    scratch: Tensor | None,
    **_others: Any,
) -> bool:
    """Chunks in sliding layers; rows of 8 bits, and those of the windows before, are decoded into `scratch` first.
    Returns True: decodes may run beside."""
    chunks, rows = step.chunks, pages.rows
    assert chunks is not None
    if rows.dtype not in EIGHT_BIT:
        sliding_chunks.sliding_chunk(q, output, step, pages=pages, own=(fresh.k, fresh.v), decoded=False)
        return True
    assert scratch is not None
    shape = chunks.window_keys(q.shape[0], rows.window), rows.heads, rows.width
    plane = math.prod(shape)
    room = scratch[:plane].view(shape), scratch[plane : 2 * plane].view(shape)
    launch(
        expand_kernels.expand_window, (max(rows.entries, -(-q.shape[0] // rows.page_tokens)), rows.heads, 2),
        *room, fresh, chunks.columns, chunks.sliding_blocks, pages.elements, CHUNKS=chunks.rows.numel(),
        COLUMNS=min(rows.width, 128), num_warps=4,
    )  # fmt: skip
    sliding_chunks.sliding_chunk(q, output, step, pages=pages, own=room, decoded=True)
    return True


def global_chunk(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    key_weight: Tensor | None,
    scratch: Tensor | None,
    inverse_frequencies: Tensor | None,
    pairs: int,
    **_others: Any,
) -> bool:
    """Chunks in global layers. Returns True: decodes may run beside."""
    assert step.chunks is not None
    passes = expanded_passes(
        step, pages=pages, key_weight=key_weight, scratch=scratch, inverse_frequencies=inverse_frequencies, pairs=pairs
    )
    decoded, turned = pages.rows.dtype in EIGHT_BIT, scratch if pages.rows.v_only else None
    for group, keys in passes:
        global_chunk_sm90.global_chunk(
            q, output, step.chunks, group, pages=pages, decoded=keys if decoded else None, turned=turned
        )
    return True


def split_pages(decode: Segments, rows: LayerRows, places: int, *, beside: bool) -> int:
    """Pages of a split at least, by kernels of `places` blocks a multiprocessor."""
    pairs = decode.slots.numel() * rows.heads
    pages = next((pages for least, pages in LONG_SPLITS if pairs >= least * places), GLOBAL_SPLIT_PAGES)
    return min(pages, BESIDE_PAGES) if beside else pages
