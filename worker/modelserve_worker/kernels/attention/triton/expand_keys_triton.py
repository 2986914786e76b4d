"""What chunk attention reads beside bfloat16 rows: rotated keys of V-only rows, decoded 8-bit rows.

Each key is made once per chunk instead of once per block of queries, and no 8-bit operand reaches a matrix product.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention.arguments import Pages, StepRows
from modelserve_worker.kernels.attention.triton.chunk_attention_triton import chunk_of
from modelserve_worker.kernels.attention.triton.packed_decode_triton import byte_values, unit_of
from modelserve_worker.kernels.attention.triton.segment_rows import table_entry
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.step import SegmentColumns


@triton.jit
def decoded(rows, scale, readable, FORMAT: tl.constexpr):
    """float32 numbers of stored elements at `rows` [N, columns]; `scale` [N, 1] multiplies those of int8."""
    stored = tl.load(rows, mask=readable, other=0)
    if FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "fp8_e5m2":
        return byte_values(stored.to(tl.int16), FORMAT).to(tl.float32) * (scale * unit_of(FORMAT))
    return stored.to(tl.float32)


@triton.jit
def row_scale(scales, readable, FORMAT: tl.constexpr):
    """[N, 1] float32: the scales of int8 rows, else one."""
    if FORMAT == "int8":
        return tl.load(scales, mask=readable, other=0.0).to(tl.float32)
    return tl.full(readable.shape, 1.0, tl.float32)


@triton.jit
def expand_keys(
    rotated_keys,  # [keys, HEADS, 2 * PAIRS]
    dense,  # pages [page, plane, HEADS, PAGE, D] of 8-bit rows as numbers
    chunks: SegmentColumns,  # of [CHUNKS]
    page_ends,  # int32 [CHUNKS] running sum of pages
    key_rows,  # int32 [CHUNKS], multiples of PAGE
    pages: Pages,
    key_weight,
    inverse_frequencies,  # float32 [PAIRS]
    CHUNKS: tl.constexpr,
    PAIRS: tl.constexpr,  # of V-only rows; 0: rows have K
    COLUMNS: tl.constexpr,  # of one copy
):
    """One page and head of the chunks' contexts, as the chunk kernels read them.

    V-only: the columns of K that rotation changes, R(j)(w * V). 8-bit formats: all planes, decoded.
    """
    launch_dependents()
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    FORMAT: tl.constexpr = pages.FORMAT
    wait_for_prerequisites()
    ends = tl.load(page_ends + tl.arange(0, CHUNKS))
    number, head = tl.program_id(0), tl.program_id(1)
    if number >= tl.max(ends):
        return
    chunk, logical = chunk_of(ends, number)
    end = tl.load(chunks.starts + chunk) + tl.load(chunks.lengths + chunk)
    slot = tl.load(chunks.slots + chunk).to(tl.int64)
    page = tl.load(table_entry(pages, slot, logical)).to(tl.int64)
    offsets = tl.arange(0, PAGE)
    keys_at = logical * PAGE + offsets
    readable = (keys_at < end)[:, None]
    tokens = (head * PAGE + offsets)[:, None]
    rows = page * pages.stride + tokens * D
    scale_rows = page * pages.scale_stride + tokens
    v_scale = row_scale(pages.v_scales + scale_rows, readable, FORMAT)
    compute = dense.dtype.element_ty
    first_key = tl.load(key_rows + chunk)
    if PAIRS:
        pairs = tl.arange(0, PAIRS)
        turned = pages.v + rows + D - 2 * PAIRS + pairs[None, :]
        first = decoded(turned, v_scale, readable, FORMAT) * tl.load(key_weight + pairs).to(tl.float32)[None, :]
        second = decoded(turned + PAIRS, v_scale, readable, FORMAT)
        second *= tl.load(key_weight + D // 2 + pairs).to(tl.float32)[None, :]
        angles = keys_at.to(tl.float32)[:, None] * tl.load(inverse_frequencies + pairs)[None, :]
        cos, sin = tl.cos(angles), tl.sin(angles)
        out = rotated_keys + ((first_key + keys_at).to(tl.int64) * pages.HEADS + head)[:, None] * (2 * PAIRS)
        target = out + pairs[None, :]
        tl.store(target, (first * cos - second * sin).to(compute), mask=readable)
        tl.store(target + PAIRS, (second * cos + first * sin).to(compute), mask=readable)
    if FORMAT == "int8" or FORMAT == "fp8_e4m3" or FORMAT == "fp8_e5m2":
        planes: tl.constexpr = 1 if PAIRS else 2
        plane_rows = dense + (first_key // PAGE + logical).to(tl.int64) * (planes * pages.HEADS * PAGE * D) + tokens * D
        for start in tl.static_range(0, D, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            if not PAIRS:
                k_scale = row_scale(pages.k_scales + scale_rows, readable, FORMAT)
                keys = decoded(pages.k + rows + columns, k_scale, readable, FORMAT)
                tl.store(plane_rows + columns, keys.to(compute), mask=readable)
            values = decoded(pages.v + rows + columns, v_scale, readable, FORMAT).to(compute)
            tl.store(plane_rows + (planes - 1) * (pages.HEADS * PAGE * D) + columns, values, mask=readable)


@triton.jit
def expand_rows(
    dense_k,
    dense_v,
    target,
    k_rows,
    v_rows,
    k_scales,
    v_scales,
    readable,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of K and V at pointers [N] -> elements from `target` [N] of the dense planes."""
    compute: tl.constexpr = dense_k.dtype.element_ty
    wanted, target = readable[:, None], target[:, None]
    k_scale, v_scale = row_scale(k_scales[:, None], wanted, FORMAT), row_scale(v_scales[:, None], wanted, FORMAT)
    for begin in tl.static_range(0, D, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)[None, :]
        keys = decoded(k_rows[:, None] + columns, k_scale, wanted, FORMAT)
        values = decoded(v_rows[:, None] + columns, v_scale, wanted, FORMAT)
        tl.store(dense_k + target + columns, keys.to(compute), mask=wanted)
        tl.store(dense_v + target + columns, values.to(compute), mask=wanted)


@triton.jit
def expand_window(
    dense_k,  # [rows, HEADS, D]: chunk c's own rows from its first + (c + 1) * (WINDOW - 1), older ones before
    dense_v,
    step_rows: StepRows,
    chunks: SegmentColumns,
    block_ends,  # int32 [CHUNKS] running sum of blocks
    pages: Pages,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one copy
):
    """Sliding rows of 8 bits, decoded: programs (n, head, 0) the n-th page of the window before every chunk, n below
    ENTRIES; (n, head, 1) the step's rows from n * PAGE.
    """
    launch_dependents()
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    WINDOW: tl.constexpr = pages.WINDOW
    FORMAT: tl.constexpr = pages.FORMAT
    wait_for_prerequisites()
    number, head = tl.program_id(0), tl.program_id(1)
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    count = tl.sum((ends < tl.max(ends)).to(tl.int32)) + 1
    offsets = tl.arange(0, PAGE)
    if tl.program_id(2) == 0:
        if number >= pages.ENTRIES:
            return
        tokens = head * PAGE + offsets
        for chunk in range(count):
            start = tl.load(chunks.starts + chunk)
            oldest = tl.maximum(start - WINDOW + 1, 0)
            logical = oldest // PAGE + number
            keys_at = logical * PAGE + offsets
            readable = (keys_at >= oldest) & (keys_at < start)
            slot = tl.load(chunks.slots + chunk).to(tl.int64)
            held = logical * PAGE < start
            page = tl.load(table_entry(pages, slot, logical), mask=held, other=0).to(tl.int64)
            target = tl.load(chunks.firsts + chunk) + (chunk + 1) * (WINDOW - 1) + keys_at - start
            rows = page * pages.stride + tokens * D
            scale_rows = page * pages.scale_stride + tokens
            expand_rows(
                dense_k, dense_v, (target.to(tl.int64) * pages.HEADS + head) * D, pages.k + rows, pages.v + rows,
                pages.k_scales + scale_rows, pages.v_scales + scale_rows, readable, D, FORMAT, COLUMNS,
            )  # fmt: skip
    else:
        row = number * PAGE + offsets
        numbers = tl.arange(0, CHUNKS)
        firsts = tl.load(chunks.firsts + numbers, mask=numbers < count, other=2147483647)
        owner = tl.sum((firsts[None, :] <= row[:, None]).to(tl.int32), 1) - 1
        owned = owner >= 0
        first = tl.load(chunks.firsts + owner, mask=owned, other=0)
        readable = owned & (row < first + tl.load(chunks.lengths + owner, mask=owned, other=0))
        target = row + (owner + 1) * (WINDOW - 1)
        places = row.to(tl.int64) * pages.HEADS + head
        expand_rows(
            dense_k, dense_v, (target.to(tl.int64) * pages.HEADS + head) * D,
            step_rows.k + places * D, step_rows.v + places * D,
            step_rows.k_scales + places, step_rows.v_scales + places, readable, D, FORMAT, COLUMNS,
        )  # fmt: skip
