"""Decode attention of global layers on Hopper that store V alone: the launch of `global_decode_sm90.cu`, over pages."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from modelserve_worker.kernels.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.paged_layout import LayerRows, rising_pages
from modelserve_worker.kernels.step import Segments

WIDTH, PAGE, PAIRS = 512, 64, 64  # columns of a head, keys of a page, pairs of columns that rotation turns
MOST_QUERIES = 8  # of a KV head: columns of a product
THREADS = 160
_PART, _TILE, _STAGES, _WARPS, _SPACING = 64, 32, 3, 4, 40  # columns of a box, keys of a tile
_SCORES, _TURNS = 2 * _WARPS * MOST_QUERIES * _SPACING * 4, PAGE // 16 * PAIRS * 8  # bytes
_SHARED_BYTES = _STAGES * (_TILE * WIDTH * 2 + 2 * 8) + _SCORES + _TURNS
SOURCE = CudaSource("global_decode_sm90.cu", "global_decode", "sm_90a", shared_bytes=_SHARED_BYTES)


def takes(rows: LayerRows, *, query_heads: int, pairs: int) -> bool:
    """Whether the kernel attends over a global layer of bfloat16 rows in pages of 64."""
    return rows.width == WIDTH and pairs == PAIRS and query_heads // rows.heads <= MOST_QUERIES


def split_decode(
    q: Tensor,
    partial: Tensor,
    maxima: Tensor,
    sums: Tensor,
    decode: Segments,
    *,
    rows: LayerRows,
    table: Tensor,
    arena: Tensor,
    key_weight: Tensor,
    turns: tuple[Tensor, Tensor, Tensor, Tensor],
    most_splits: int,
    split_pages: int,
    beside: bool,
) -> None:
    """Rows [0, B) of q [T, Hq, 512] bfloat16 -> float32 outputs, maxima and sums of splits, as `combine` reads them.

    `turns`: cos and sin of the first key of each page [pages, 64], and of a page's keys [64, 64]. `beside`: see
    `decode_attention`.
    """
    count, group = decode.slots.numel(), q.shape[1] // rows.heads
    assert q.dtype == torch.bfloat16
    assert turns[2].shape == (PAGE, PAIRS)
    rising = rising_pages(rows.origin, rows.page_stride, size=arena.numel())
    values = tensor_map(
        arena.data_ptr() + rising.first + rows.offsets["v"], (_PART, rows.heads * PAGE, WIDTH // _PART, rising.pages),
        (2 * WIDTH, 2 * _PART, rising.stride), (_PART, _TILE, WIDTH // _PART, 1), promoted=False,
    )  # fmt: skip
    numbers = (rising.origin, rising.step)
    sizes = (rows.heads, group, most_splits, split_pages, int(beside))
    launch(
        SOURCE, grid=(rows.heads * most_splits, count), threads=THREADS,
        arguments=(
            (values, None), *map(pointer, (q, partial, maxima, sums, decode.slots, decode.positions, table)),
            (table.stride(0), ctypes.c_longlong), *((number, ctypes.c_int) for number in numbers),
            *map(pointer, (key_weight, *turns)), *((size, ctypes.c_int) for size in sizes),
        ),
    )  # fmt: skip
