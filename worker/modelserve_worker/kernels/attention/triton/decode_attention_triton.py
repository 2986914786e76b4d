"""Decode attention over pages: segments of few rows, one or with drafts up to ROWS, keys cut into splits.

A segment reads pages first..last of its block table once for all its rows, cut into splits of a length that depends on
its positions alone: so a request's bits do not depend on the batch beside it. A program computes one (segment, split,
KV head), or PART of the rows where all do not fit, and leaves unnormalised outputs with their maxima and sums;
`combine` merges a row's splits in order. No atomics. What `prepare` wrote is read from the L2 cache (`.cg`): BESIDE the
kernel of the step's chunks most programs do not wait, so nothing says that their multiprocessor's own cache knows of
it.

V-only rows: with K = rope(w * V), the key norm's weight w of unrotated columns is in the queries already (`prepare`
folds it in). Rotated pairs are made from V in the kernel; the angle of position j = j0 + t comes from a table of tile
starts and a table of one tile. Rows and queries are in the order of `row_codec.v_only_columns`, the rotated pairs
last, so that they are column blocks of their own and no byte is read twice.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention.arguments import Pages, Splits, Turns
from modelserve_worker.kernels.attention.triton.segment_rows import (
    online_softmax,
    own_split,
    prefetch_page,
    query_rows,
    result_rows,
    segment_of,
    table_entry,
    visible_keys,
)
from modelserve_worker.kernels.compiling.dependent_launch import (
    launch_dependents,
    wait_for_prerequisites,
    wait_for_what_is_read,
)
from modelserve_worker.kernels.step import SegmentColumns

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_decode(
    q,  # [rows, HEADS * GROUP, D]
    splits: Splits,
    segments: SegmentColumns,
    pages: Pages,
    TILE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # of a segment at most
    PART: tl.constexpr,  # of them in a program, ROWS or less
    BESIDE: tl.constexpr,  # the kernel of the step's chunks
):
    launch_dependents()
    compute: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    tiles_per_page: tl.constexpr = PAGE // TILE
    head, split, slot, start, last, row, begin, end, active = own_split(
        segments, pages, splits, SPLIT_PAGES, ROWS, PART
    )
    first_page = tl.load(table_entry(pages, slot, begin), mask=active, other=0).to(tl.int64)
    plane = first_page * pages.stride + head * (PAGE * D)
    prefetch_page(pages.k + plane, active, PAGE * D)
    prefetch_page(pages.v + plane, active, PAGE * D)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, columns, offsets = tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, TILE)
    q_rows = query_rows(q, splits, row, head, members, ROWS)
    wanted = members < splits.GROUP * (last - start + 1)
    queries = tl.load(q_rows + columns[None, :], mask=wanted[:, None], other=0.0, cache_modifier=".cg")
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, D], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, last // TILE + 1)):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        if pages.WINDOW:
            readable = readable & (keys_at > start - pages.WINDOW)
        page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = page * pages.stride + tokens[:, None] * D + columns[None, :]
        keys = tl.load(pages.k + rows, mask=readable[:, None], other=0.0, cache_modifier=".cg")
        values = tl.load(pages.v + rows, mask=readable[:, None], other=0.0, cache_modifier=".cg")
        scores = tl.dot(queries, tl.trans(keys).to(compute))
        visible = visible_keys(keys_at, readable, start, members, splits.GROUP, pages.WINDOW, ROWS)
        scores = tl.where(visible, scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total, ROWS)
        output = tl.dot(weights.to(compute), values.to(compute), output * decay[:, None])
    result = result_rows(splits, row, split, head, members, ROWS)
    tl.store(splits.outputs + result.to(tl.int64)[:, None] * D + columns[None, :], output, mask=wanted[:, None])
    tl.store(splits.maxima + result, maximum, mask=wanted)
    tl.store(splits.sums + result, total, mask=wanted)


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
    splits: Splits,
    segments: SegmentColumns,
    pages: Pages,
    key_weight,  # [D]
    turns: Turns,
    TILE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BESIDE: tl.constexpr,
):
    launch_dependents()
    compute: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    PAIRS: tl.constexpr = turns.PAIRS
    tiles_per_page: tl.constexpr = PAGE // TILE
    wide: tl.constexpr = D // 4  # unrotated columns, in blocks of a power of two: short, independent chains of products
    narrow: tl.constexpr = D // 2 - 2 * PAIRS
    turned_1: tl.constexpr = D - 2 * PAIRS  # columns of the first numbers of pairs, then of the second ones
    turned_2: tl.constexpr = D - PAIRS
    head, split, slot, start, last, row, begin, end, active = own_split(
        segments, pages, splits, SPLIT_PAGES, ROWS, PART
    )
    first_page = tl.load(table_entry(pages, slot, begin), mask=active, other=0).to(tl.int64)
    prefetch_page(pages.v + first_page * pages.stride + head * (PAGE * D), active, PAGE * D)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, offsets, pairs = tl.arange(0, BLOCK_M), tl.arange(0, TILE), tl.arange(0, PAIRS)
    wanted = members < splits.GROUP * (last - start + 1)
    q_rows = query_rows(q, splits, row, head, members, ROWS)
    qv = column_block(q_rows, 0, wanted, wide)
    qw = column_block(q_rows, wide, wanted, wide)
    qn = column_block(q_rows, 2 * wide, wanted, narrow)
    q1 = column_block(q_rows, turned_1, wanted, PAIRS)
    q2 = column_block(q_rows, turned_2, wanted, PAIRS)
    weight_1 = tl.load(key_weight + pairs).to(tl.float32)[None, :]
    weight_2 = tl.load(key_weight + D // 2 + pairs).to(tl.float32)[None, :]
    cos_t = tl.load(turns.turn_cos + offsets[:, None] * PAIRS + pairs[None, :])
    sin_t = tl.load(turns.turn_sin + offsets[:, None] * PAIRS + pairs[None, :])
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    ov = tl.zeros([BLOCK_M, wide], tl.float32)
    ow = tl.zeros([BLOCK_M, wide], tl.float32)
    on = tl.zeros([BLOCK_M, narrow], tl.float32)
    o1 = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    o2 = tl.zeros([BLOCK_M, PAIRS], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, last // TILE + 1)):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = pages.v + page * pages.stride + tokens[:, None] * D
        vv = column_block(rows, 0, readable, wide)
        vw = column_block(rows, wide, readable, wide)
        vn = column_block(rows, 2 * wide, readable, narrow)
        v1 = column_block(rows, turned_1, readable, PAIRS)
        v2 = column_block(rows, turned_2, readable, PAIRS)
        cos_0 = tl.load(turns.start_cos + tile * PAIRS + pairs)[None, :]
        sin_0 = tl.load(turns.start_sin + tile * PAIRS + pairs)[None, :]
        cos, sin = cos_0 * cos_t - sin_0 * sin_t, sin_0 * cos_t + cos_0 * sin_t
        k1 = v1.to(tl.float32) * weight_1
        k2 = v2.to(tl.float32) * weight_2
        scores = tl.dot(qv, tl.trans(vv).to(compute))
        scores += tl.dot(qw, tl.trans(vw).to(compute))
        scores += tl.dot(qn, tl.trans(vn).to(compute))
        scores += tl.dot(q1, tl.trans((k1 * cos - k2 * sin).to(compute)))
        scores += tl.dot(q2, tl.trans((k2 * cos + k1 * sin).to(compute)))
        visible = visible_keys(keys_at, readable, start, members, splits.GROUP, 0, ROWS)
        scores = tl.where(visible, scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total, ROWS)
        p = weights.to(compute)
        decay = decay[:, None]
        ov = tl.dot(p, vv.to(compute), ov * decay)
        ow = tl.dot(p, vw.to(compute), ow * decay)
        on = tl.dot(p, vn.to(compute), on * decay)
        o1 = tl.dot(p, v1.to(compute), o1 * decay)
        o2 = tl.dot(p, v2.to(compute), o2 * decay)
    result = result_rows(splits, row, split, head, members, ROWS)
    target = splits.outputs + result.to(tl.int64)[:, None] * D
    tl.store(target + tl.arange(0, wide)[None, :], ov, mask=wanted[:, None])
    tl.store(target + wide + tl.arange(0, wide)[None, :], ow, mask=wanted[:, None])
    tl.store(target + 2 * wide + tl.arange(0, narrow)[None, :], on, mask=wanted[:, None])
    tl.store(target + turned_1 + pairs[None, :], o1, mask=wanted[:, None])
    tl.store(target + turned_2 + pairs[None, :], o2, mask=wanted[:, None])
    tl.store(splits.maxima + result, maximum, mask=wanted)
    tl.store(splits.sums + result, total, mask=wanted)


@triton.jit(do_not_specialize=["split_pages"])
def combine(
    splits: Splits,
    segments: SegmentColumns,
    output,  # [rows, HEADS * GROUP, D]
    split_pages,  # of a split, at least
    PAIRS: tl.constexpr,  # of V-only rows, 0 for others
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOGETHER: tl.constexpr,  # splits that are read at a time
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,  # rows that are not split are outputs already
):
    launch_dependents()
    KV_HEADS: tl.constexpr = splits.HEADS
    GROUP: tl.constexpr = splits.GROUP
    D: tl.constexpr = splits.D
    MOST_SPLITS: tl.constexpr = splits.MOST
    segment, offset, member = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS, tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    start, last, row = segment_of(segments, segment, ROWS)
    row += offset
    pages = last // PAGE + 1
    if WINDOW:
        pages -= tl.maximum(start - WINDOW + 1, 0) // PAGE
    count = tl.cdiv(pages, tl.maximum(split_pages, tl.cdiv(pages, MOST_SPLITS)))  # as `split_range` has it
    wait_for_prerequisites()
    wanted = (start >= 0) & (start + offset <= last)
    if WHOLE:
        wanted = wanted & (count > 1)
    if wanted:
        highest, total, merged = -float("inf"), 0.0, tl.zeros([COLUMNS], tl.float32)
        for first in range(0, count, TOGETHER):
            part = first + tl.arange(0, TOGETHER)
            present = part < count
            parts = ((row * MOST_SPLITS + part) * KV_HEADS + member // GROUP) * GROUP + member % GROUP
            at = parts.to(tl.int64)[:, None] * D + columns[None, :]
            values = tl.load(splits.outputs + at, mask=present[:, None], other=0.0)  # first: they take longest to come
            high = tl.load(splits.maxima + parts, mask=present, other=-float("inf"))
            sums_of_parts = tl.load(splits.sums + parts, mask=present, other=0.0)
            raised = tl.maximum(highest, tl.max(high, 0))
            weights, decay = tl.where(present, tl.exp2(high - raised), 0.0), tl.exp2(highest - raised)
            merged = merged * decay + tl.sum(values * weights[:, None], 0)
            total = total * decay + tl.sum(weights * sums_of_parts, 0)
            highest = raised
        if PAIRS:
            columns = natural_columns(columns, D, PAIRS)
        at_output = (row * KV_HEADS * GROUP + member).to(tl.int64) * D + columns
        tl.store(output + at_output, (merged / total).to(output.dtype.element_ty))
