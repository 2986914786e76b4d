"""Chunk attention of global layers on Hopper: the launch of `global_chunk_sm90.cu`, over pages or decoded pages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.backends.attention import GLOBAL_WIDTH, PAIRS, global_chunk_bytes
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS
from modelserve_worker.kernels.attention.arguments import LayerPages, Pages
from modelserve_worker.kernels.attention.paged_layout import rising_pages
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.step import Segments

CLUSTER = 2  # thread blocks that share their tiles of keys
WIDTH, PAGE = GLOBAL_WIDTH, GLOBAL_PAGE_TOKENS  # columns of a head, keys of a page
TURNED = 2 * PAIRS  # columns of K that rotation changes
THREADS = 384


@dataclass(frozen=True)
class Variant:
    """One compilation, and the keys of a tile."""

    source: CudaSource
    tile_keys: int


def _variant(*, key_plane: bool) -> Variant:
    shared = global_chunk_bytes(key_plane=key_plane)
    defines = (f"KEY_PLANE={int(key_plane)}",)
    source = CudaSource("global_chunk_sm90.cu", "global_chunk", "sm_90a", defines, shared)
    return Variant(source, 32 if key_plane else 64)


V_ONLY, WITH_KEYS = _variant(key_plane=False), _variant(key_plane=True)


def global_chunk(
    q: Tensor,
    output: Tensor,
    chunks: Segments,
    group: Segments,
    *,
    pages: LayerPages,
    decoded: Pages | None,
    turned: Tensor | None,
) -> None:
    """Queries of the group's chunks [T, Hq, 512] bfloat16 -> the same rows of `output`.

    `decoded`: bfloat16 pages of 8-bit rows, where a chunk's are consecutive from its row of the expanded keys. `turned`
    [keys, heads, 128], flat: what `expand_keys` made of V-only rows; None: rows have K.
    """
    rows, arena, table = pages.rows, pages.arena, None if decoded else pages.table
    kv_heads, size = rows.heads, q.element_size()
    queries = q.shape[1] // kv_heads
    assert q.dtype == torch.bfloat16
    assert 64 % queries == 0, "the rows of a thread block are whole tokens"
    if decoded is None:
        rising = rising_pages(rows.origin, rows.page_stride, size=arena.numel())
        planes = tuple(arena.data_ptr() + rising.first + rows.offsets.get(plane, 0) for plane in ("v", "k"))
    else:
        rising = rising_pages(0, decoded.stride * size, size=decoded.k.nbytes)
        planes = decoded.v.data_ptr(), decoded.k.data_ptr()
    variant = WITH_KEYS if turned is None else V_ONLY
    shape, strides = (WIDTH, kv_heads * PAGE, rising.pages), (WIDTH * size, rising.stride)
    values, keys = (tensor_map(plane, shape, strides, (64, variant.tile_keys, 1)) for plane in planes)
    if turned is not None:
        row = kv_heads * TURNED
        keys = tensor_map(
            turned.data_ptr(), (TURNED, kv_heads, turned.numel() // row), (TURNED * size, row * size),
            (64, 1, variant.tile_keys),
        )  # fmt: skip
    described = (chunks.rows, chunks.starts, chunks.lengths, chunks.slots, group.blocks, group.key_rows)
    table_stride = 0 if table is None else table.stride(0)
    numbers = (rising.origin, rising.step, chunks.rows.numel(), kv_heads, queries)
    launch(
        variant.source, grid=(group.most_blocks * CLUSTER, kv_heads), threads=THREADS,
        arguments=(
            (values, None), (keys, None), pointer(q), pointer(output), *map(pointer, described), pointer(table),
            (table_stride, ctypes.c_longlong), *((number, ctypes.c_int) for number in numbers),
        ),
    )  # fmt: skip
