"""Chunk attention of sliding layers in steps where some rows see what is behind them: rows of images.

It is that of `chunk_attention_triton`, which blocks of queries whose rows see no further compute alike, to the bit; a
block that has others goes on to the last key that any of its rows sees. Those are rows of the step, in its buffers.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention_tiles import attention_specimens
from modelserve_worker.kernels.chunk_attention_triton import sliding_rows
from modelserve_worker.kernels.dependent_launch import launch_dependents, wait_for_prerequisites


@triton.jit
def sliding_chunk_spans(
    q,
    output,
    step_k,  # encoded rows of the step [T, KV_HEADS, D]
    step_v,
    step_k_scale,  # float16 [T, KV_HEADS], int8 only
    step_v_scale,
    chunk_rows,
    chunk_starts,
    chunk_lengths,
    chunk_slots,
    block_ends,
    table,
    table_stride,
    arena,
    scales,
    origin: tl.int64,
    page_stride: tl.int64,
    k_offset: tl.int64,
    v_offset: tl.int64,
    scale_origin: tl.int64,
    scale_stride: tl.int64,
    k_scale_offset: tl.int64,
    v_scale_offset: tl.int64,
    last_keys,  # int32 [T] the last position that each row sees
    CHUNKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block, head = tl.program_id(0), tl.program_id(1)
    if block >= tl.max(ends):
        return
    sliding_rows(
        block, head, ends, last_keys, q, output, step_k, step_v, step_k_scale, step_v_scale, chunk_rows,
        chunk_starts, chunk_lengths, chunk_slots, table, table_stride, arena, scales, origin, page_stride,
        k_offset, v_offset, scale_origin, scale_stride, k_scale_offset, v_scale_offset, KV_HEADS, GROUP, D,
        PAGE, TILE, ENTRIES, WINDOW, FORMAT, BLOCK_M, SPANS=True,
    )  # fmt: skip


SPECIMENS = tuple(
    specimen
    for fmt in ("bfloat16", "int8", "fp8_e4m3")
    for specimen in attention_specimens(sliding_chunk_spans, "sliding", fmt, door="chunk", spilled_bytes=96)
)
