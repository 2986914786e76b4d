"""Chunk attention of sliding layers on Hopper: the launch of `sliding_chunk_sm90.cu`, over pages and step rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.backends.attention import SLIDING_WIDTH, sliding_chunk_bytes
from modelserve.sizing.pages import SLIDING_PAGE_TOKENS
from modelserve_worker.kernels.attention.arguments import LayerPages
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.step import Step

WIDTH, PAGE, PART = SLIDING_WIDTH, SLIDING_PAGE_TOKENS, 64  # columns of a head, keys of a page, columns of a box
ROWS = 128  # queries of a thread block
THREADS = 384
_BOX = (PART, 8, WIDTH // PART, 1)  # an octet: all columns of eight keys
SOURCE = CudaSource("sliding_chunk_sm90.cu", "sliding_chunk", "sm_90a", shared_bytes=sliding_chunk_bytes())


def page_maps(pages: LayerPages, *, promoted: bool = True) -> list[Any]:
    """Octets of K and of V in pages: [pages, 4, heads * 32, 64], the columns in four parts."""
    rows, arena = pages.rows, pages.arena
    shape = (PART, rows.heads * PAGE, WIDTH // PART, (arena.numel() - rows.origin) // rows.page_stride)
    strides, first = (2 * WIDTH, 2 * PART, rows.page_stride), arena.data_ptr() + rows.origin
    return [tensor_map(first + rows.offsets[plane], shape, strides, _BOX, promoted=promoted) for plane in ("k", "v")]


def sliding_chunk(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    own: tuple[Tensor, Tensor],
    decoded: bool,
) -> None:
    """Queries of all chunks [T, Hq, 256] bfloat16 -> the same rows of `output`.

    `own`: K and V of the step, bfloat16 [T, heads, 256], and older ones are in `pages`; or, `decoded`, what
    `expand_window` made of both. Fewer thread blocks work where many requests decode, whose attention may run beside
    this.
    """
    chunks, decode, rows, table = step.chunks, step.decode, pages.rows, pages.table
    assert chunks is not None
    tokens, query_heads, _ = q.shape
    group = query_heads // rows.heads
    assert q.dtype == torch.bfloat16
    assert ROWS // 2 % group == 0, "the rows of a warpgroup are whole tokens"
    row, part = WIDTH * q.element_size(), PART * q.element_size()
    queries = tensor_map(
        q.data_ptr(), (WIDTH, query_heads, tokens), (row, query_heads * row), (PART, group, ROWS // 2 // group)
    )
    steps = [
        tensor_map(
            plane.data_ptr(), (PART, plane.shape[0], WIDTH // PART, rows.heads), (rows.heads * row, part, row), _BOX
        )
        for plane in own
    ]
    older_maps = steps if decoded else page_maps(pages)
    described = (chunks.rows, chunks.starts, chunks.lengths, chunks.slots, chunks.sliding_blocks, table)
    older = rows.window - 1 if decoded else 0
    numbers = (rows.entries, chunks.rows.numel(), rows.heads, group, rows.window, older)
    decodes = None if decode is None else decode.positions
    most_decodes = 0 if decodes is None else min(THREADS, decodes.numel())
    launch(
        SOURCE, grid=(chunks.most_sliding_blocks * rows.heads, 1), threads=THREADS,
        resident=1,
        arguments=(
            *((each, None) for each in (queries, *older_maps, *steps)), pointer(output), *map(pointer, described),
            (table.stride(0), ctypes.c_longlong), *((number, ctypes.c_int) for number in numbers), pointer(decodes),
            (most_decodes, ctypes.c_int),
        ),
    )  # fmt: skip
