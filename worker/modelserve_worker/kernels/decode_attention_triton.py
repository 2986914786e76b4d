"""Decode attention over pages: one query token per request, its keys cut into splits, one program each.

A request at position p reads pages first..last of its block table, cut into splits of a length that depends on p alone:
so a request's bits do not depend on the batch beside it. A program computes one (row, split, KV head) and leaves an
unnormalised output with its maximum and sum; `combine` merges a request's splits in order. No atomics. What `prepare`
wrote is read from the L2 cache (`.cg`): BESIDE the kernel of the step's chunks most programs do not wait, so nothing
says that their multiprocessor's own cache knows of it.

V-only rows: with K = rope(w * V), the key norm's weight w of unrotated columns is in the queries already (`prepare`
folds it in). Rotated pairs are made from V in the kernel; the angle of position j = j0 + t comes from a table of tile
starts and a table of one tile. Rows and queries are in the order of `row_codec.v_only_columns`, the rotated pairs
last, so that they are column blocks of their own and no byte is read twice.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention_tiles import attention_specimens
from modelserve_worker.kernels.dependent_launch import (
    launch_dependents,
    prefetch,
    wait_for_prerequisites,
    wait_for_what_is_read,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_range(
    position, split, PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_PAGES: tl.constexpr, MOST_SPLITS: tl.constexpr
):
    """First page of a split and the page after its last one; empty when the request has fewer splits."""
    first_page = 0
    if WINDOW:
        first_page = tl.maximum(position - WINDOW + 1, 0) // PAGE
    pages = position // PAGE - first_page + 1
    per_split = tl.maximum(SPLIT_PAGES, tl.cdiv(pages, MOST_SPLITS))
    begin = first_page + split * per_split
    return begin, tl.minimum(begin + per_split, first_page + pages)


@triton.jit
def prefetch_page(plane, wanted, ELEMENTS: tl.constexpr):
    """One head's rows of a page, which lie side by side: a split's first, while `prepare` still makes the queries."""
    line: tl.constexpr = 1024 // plane.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    prefetch(plane + tl.arange(0, ELEMENTS // line) * line, wanted)


@triton.jit
def online_softmax(scores, maximum, total):
    """One tile, of which every row sees a key: weights, decay of earlier sums, new maximum and sum (base 2)."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    return weights, decay, new_maximum, total * decay + tl.sum(weights, 1)


@triton.jit
def split_decode(
    q,  # [rows, KV_HEADS * GROUP, D]
    partial,  # float32 [rows, MOST_SPLITS, KV_HEADS, GROUP, D]
    maxima,  # float32 [rows, MOST_SPLITS, KV_HEADS, GROUP], of scores times log2(e)
    sums,  # float32, as maxima
    slots,  # int32 [rows]
    positions,  # int32 [rows]; -1: padding
    table,
    table_stride,
    arena,  # element pointer at the pool's start
    scales,  # float16 pointer at the pool's start
    origin: tl.int64,  # of page 0, in elements
    page_stride: tl.int64,  # elements from page n to page n + 1
    k_offset: tl.int64,  # of the layer's plane in a page, in elements
    v_offset: tl.int64,
    scale_origin: tl.int64,  # the same in float16 units
    scale_stride: tl.int64,
    k_scale_offset: tl.int64,
    v_scale_offset: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,  # of a sliding table; 0: a global one
    WINDOW: tl.constexpr,  # 0: none
    SPLIT_PAGES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BESIDE: tl.constexpr,  # the kernel of the step's chunks
):
    launch_dependents()
    compute: tl.constexpr = q.dtype.element_ty
    tiles_per_page: tl.constexpr = PAGE // TILE
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    begin, end = split_range(position, split, PAGE, WINDOW, SPLIT_PAGES, MOST_SPLITS)
    active = (begin < end) & (position >= 0)
    entry = begin
    if ENTRIES:
        entry = begin % ENTRIES
    first_page = tl.load(table + slot * table_stride + entry, mask=active, other=0).to(tl.int64)
    plane = arena + origin + first_page * page_stride + head * (PAGE * D)
    prefetch_page(plane + k_offset, active, PAGE * D)
    prefetch_page(plane + v_offset, active, PAGE * D)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, columns, offsets = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, TILE)
    q_rows = q + (row * KV_HEADS + head).to(tl.int64) * GROUP * D + members[:, None] * D
    queries = tl.load(q_rows + columns[None, :], mask=members[:, None] < GROUP, other=0.0, cache_modifier=".cg")
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, D], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, position // TILE + 1)):
        keys_at = tile * TILE + offsets
        readable = keys_at <= position
        if WINDOW:
            readable = readable & (keys_at > position - WINDOW)
        entry = tile // tiles_per_page
        if ENTRIES:
            entry = entry % ENTRIES
        page = tl.load(table + slot * table_stride + entry).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = arena + origin + page * page_stride + tokens[:, None] * D + columns[None, :]
        keys = tl.load(rows + k_offset, mask=readable[:, None], other=0.0, cache_modifier=".cg")
        values = tl.load(rows + v_offset, mask=readable[:, None], other=0.0, cache_modifier=".cg")
        scores = tl.dot(queries, tl.trans(keys).to(compute))
        scores = tl.where(readable[None, :], scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        output = tl.dot(weights.to(compute), values.to(compute), output * decay[:, None])
    result = ((row * MOST_SPLITS + split) * KV_HEADS + head) * GROUP + members
    tl.store(partial + result.to(tl.int64)[:, None] * D + columns[None, :], output, mask=members[:, None] < GROUP)
    tl.store(maxima + result, maximum, mask=members < GROUP)
    tl.store(sums + result, total, mask=members < GROUP)


@triton.jit
def column_block(rows, start: tl.constexpr, wanted, COLUMNS: tl.constexpr):
    """Columns [start, start + COLUMNS) of rows of pointers [N, 1]; zeros where `wanted` [N] is false."""
    at = rows + start + tl.arange(0, COLUMNS)[None, :]
    return tl.load(at, mask=wanted[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def natural_columns(columns, D: tl.constexpr, PAIRS: tl.constexpr):
    """Place in a head of each column of a row that has its rotated pairs last (`row_codec.v_only_columns`)."""
    unrotated: tl.constexpr = D // 2 - PAIRS
    place = tl.where(columns < unrotated, columns + PAIRS, columns + 2 * PAIRS)
    place = tl.where(columns >= 2 * unrotated, columns - 2 * unrotated, place)
    return tl.where(columns >= D - PAIRS, columns - 2 * unrotated + unrotated, place)


@triton.jit
def split_decode_v_only(
    q,
    partial,
    maxima,
    sums,
    slots,
    positions,
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
    key_weight,  # [D]
    start_cos,  # float32 [tiles, PAIRS] of j0
    start_sin,
    turn_cos,  # float32 [TILE, PAIRS] of t
    turn_sin,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BESIDE: tl.constexpr,  # the kernel of the step's chunks
):
    launch_dependents()
    compute: tl.constexpr = q.dtype.element_ty
    tiles_per_page: tl.constexpr = PAGE // TILE
    wide: tl.constexpr = D // 4  # unrotated columns, in blocks of a power of two: short, independent chains of products
    narrow: tl.constexpr = D // 2 - 2 * PAIRS
    firsts: tl.constexpr = D - 2 * PAIRS
    seconds: tl.constexpr = D - PAIRS
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    begin, end = split_range(position, split, PAGE, 0, SPLIT_PAGES, MOST_SPLITS)
    active = (begin < end) & (position >= 0)
    first_page = tl.load(table + slot * table_stride + begin, mask=active, other=0).to(tl.int64)
    plane = arena + origin + first_page * page_stride + head * (PAGE * D)
    prefetch_page(plane + v_offset, active, PAGE * D)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, offsets, pairs = tl.arange(0, BLOCK_M), tl.arange(0, TILE), tl.arange(0, PAIRS)
    wanted = members < GROUP
    q_rows = q + (row * KV_HEADS + head).to(tl.int64) * GROUP * D + members[:, None] * D
    qv = column_block(q_rows, 0, wanted, wide)
    qw = column_block(q_rows, wide, wanted, wide)
    qn = column_block(q_rows, 2 * wide, wanted, narrow)
    q1 = column_block(q_rows, firsts, wanted, PAIRS)
    q2 = column_block(q_rows, seconds, wanted, PAIRS)
    weight_1 = tl.load(key_weight + pairs).to(tl.float32)[None, :]
    weight_2 = tl.load(key_weight + D // 2 + pairs).to(tl.float32)[None, :]
    cos_t = tl.load(turn_cos + offsets[:, None] * PAIRS + pairs[None, :])
    sin_t = tl.load(turn_sin + offsets[:, None] * PAIRS + pairs[None, :])
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    ov = tl.zeros([BLOCK_M, wide], tl.float32)
    ow = tl.zeros([BLOCK_M, wide], tl.float32)
    on = tl.zeros([BLOCK_M, narrow], tl.float32)
    o1 = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    o2 = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, position // TILE + 1)):
        readable = tile * TILE + offsets <= position
        page = tl.load(table + slot * table_stride + tile // tiles_per_page).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = arena + origin + page * page_stride + v_offset + tokens[:, None] * D
        vv = column_block(rows, 0, readable, wide)
        vw = column_block(rows, wide, readable, wide)
        vn = column_block(rows, 2 * wide, readable, narrow)
        v1 = column_block(rows, firsts, readable, PAIRS)
        v2 = column_block(rows, seconds, readable, PAIRS)
        cos_0 = tl.load(start_cos + tile * PAIRS + pairs)[None, :]
        sin_0 = tl.load(start_sin + tile * PAIRS + pairs)[None, :]
        cos, sin = cos_0 * cos_t - sin_0 * sin_t, sin_0 * cos_t + cos_0 * sin_t
        k1 = v1.to(tl.float32) * weight_1
        k2 = v2.to(tl.float32) * weight_2
        scores = tl.dot(qv, tl.trans(vv).to(compute))
        scores += tl.dot(qw, tl.trans(vw).to(compute))
        scores += tl.dot(qn, tl.trans(vn).to(compute))
        scores += tl.dot(q1, tl.trans((k1 * cos - k2 * sin).to(compute)))
        scores += tl.dot(q2, tl.trans((k2 * cos + k1 * sin).to(compute)))
        scores = tl.where(readable[None, :], scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        p = weights.to(compute)
        decay = decay[:, None]
        ov = tl.dot(p, vv.to(compute), ov * decay)
        ow = tl.dot(p, vw.to(compute), ow * decay)
        on = tl.dot(p, vn.to(compute), on * decay)
        o1 = tl.dot(p, v1.to(compute), o1 * decay)
        o2 = tl.dot(p, v2.to(compute), o2 * decay)
    result = ((row * MOST_SPLITS + split) * KV_HEADS + head) * GROUP + members
    target = partial + result.to(tl.int64)[:, None] * D
    tl.store(target + tl.arange(0, wide)[None, :], ov, mask=wanted[:, None])
    tl.store(target + wide + tl.arange(0, wide)[None, :], ow, mask=wanted[:, None])
    tl.store(target + 2 * wide + tl.arange(0, narrow)[None, :], on, mask=wanted[:, None])
    tl.store(target + firsts + pairs[None, :], o1, mask=wanted[:, None])
    tl.store(target + seconds + pairs[None, :], o2, mask=wanted[:, None])
    tl.store(maxima + result, maximum, mask=wanted)
    tl.store(sums + result, total, mask=wanted)


@triton.jit
def combine(
    partial,
    maxima,
    sums,
    positions,
    output,  # [rows, KV_HEADS * GROUP, D]
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,  # of V-only rows, 0 for others
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,  # MOST_SPLITS rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    launch_dependents()
    row, member = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    splits = tl.arange(0, SPLITS)
    position = tl.load(positions + row)
    first_page, _ = split_range(position, 0, PAGE, WINDOW, SPLIT_PAGES, MOST_SPLITS)
    pages = position // PAGE - first_page + 1
    present = splits < tl.cdiv(pages, tl.maximum(SPLIT_PAGES, tl.cdiv(pages, MOST_SPLITS)))
    parts = ((row * MOST_SPLITS + splits) * KV_HEADS + member // GROUP) * GROUP + member % GROUP
    wait_for_prerequisites()
    if position >= 0:
        at = parts.to(tl.int64)[:, None] * D + columns[None, :]
        values = tl.load(partial + at, mask=present[:, None], other=0.0)  # first: they take longest to come
        high = tl.load(maxima + parts, mask=present, other=-float("inf"))
        sums_of_parts = tl.load(sums + parts, mask=present, other=0.0)
        weights = tl.where(present, tl.exp2(high - tl.max(high, 0)), 0.0)
        merged = tl.sum(values * weights[:, None], 0) / tl.sum(weights * sums_of_parts, 0)
        if PAIRS:
            columns = natural_columns(columns, D, PAIRS)
        at_output = (row * KV_HEADS * GROUP + member).to(tl.int64) * D + columns
        tl.store(output + at_output, merged.to(output.dtype.element_ty))


SPECIMENS = (
    *attention_specimens(split_decode, "kv", "bfloat16", door="decode"),
    *attention_specimens(split_decode, "sliding", "bfloat16", door="decode"),
    *attention_specimens(split_decode_v_only, "v_only", "bfloat16", door="decode", spilled_bytes=128),
    *(
        s
        for layout in ("kv", "v_only", "sliding")
        for s in attention_specimens(combine, layout, "bfloat16", door="decode")
    ),
)
