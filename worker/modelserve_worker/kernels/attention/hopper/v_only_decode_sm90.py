"""Decode attention of global layers on Hopper that store V alone: the launch of `v_only_decode_sm90.cu`, over pages."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from modelserve.sizing.backends.attention import GLOBAL_WIDTH, PAIRS, global_decode_bytes
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS
from modelserve_worker.kernels.attention.arguments import LayerPages, Splits, Turns
from modelserve_worker.kernels.attention.hopper.decode_stream_sm90 import BESIDE_BLOCKS
from modelserve_worker.kernels.attention.paged_layout import rising_pages
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.step import Segments

WIDTH, PAGE = GLOBAL_WIDTH, GLOBAL_PAGE_TOKENS  # columns of a head, keys of a page
THREADS = 160
_PART, _TILE = 64, 32  # columns of a box, keys of a tile
SOURCE = CudaSource("v_only_decode_sm90.cu", "global_decode", "sm_90a", shared_bytes=global_decode_bytes())


def split_decode(
    q: Tensor,
    output: Tensor,
    splits: Splits,
    decode: Segments,
    *,
    pages: LayerPages,
    key_weight: Tensor,
    turns: Turns,
    split_pages: int,
    beside: bool,
) -> None:
    """Rows [0, B) of q [T, Hq, 512] bfloat16 -> the same rows of `output` where they are not split; float32 outputs,
    maxima and sums of the others' splits, as `combine` reads them.

    `turns`: by pages, of 64 pairs. `beside`: see `decode_attention`.
    """
    rows, arena, table = pages.rows, pages.arena, pages.table
    count, group, most_splits = decode.slots.numel(), q.shape[1] // rows.heads, splits.MOST.value
    assert q.dtype == torch.bfloat16
    assert turns.turn_cos.shape == (PAGE, PAIRS)
    rising = rising_pages(rows.origin, rows.page_stride, size=arena.numel())
    values = tensor_map(
        arena.data_ptr() + rising.first + rows.offsets["v"], (_PART, rows.heads * PAGE, WIDTH // _PART, rising.pages),
        (2 * WIDTH, 2 * _PART, rising.stride), (_PART, _TILE, WIDTH // _PART, 1), promoted=False,
    )  # fmt: skip
    numbers = (rising.origin, rising.step)
    sizes = (count, rows.heads, group, most_splits, split_pages, int(decode.settled), int(beside))
    blocks = min(count * rows.heads * most_splits, BESIDE_BLOCKS)
    launch(
        SOURCE, grid=(blocks, 1), threads=THREADS, resident=0 if beside else 2,
        arguments=(
            (values, None), *map(pointer, (q, output, *splits[:3], decode.slots, decode.positions, table)),
            (table.stride(0), ctypes.c_longlong), *((number, ctypes.c_int) for number in numbers),
            *map(pointer, (key_weight, *turns[:4])), *((size, ctypes.c_int) for size in sizes),
        ),
    )  # fmt: skip
