"""Triton kernels of a drafter that proposes a block at once: its rows into pages, and attention of blocks over them."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention.arguments import Blocks, DraftPages
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites


@triton.jit
def page_entry(page, FIRST: tl.constexpr, ENTRIES: tl.constexpr):
    """Entry of the block table of a logical page."""
    if ENTRIES:
        page = page % ENTRIES
    return page + FIRST


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def store_draft_rows(k, k_stride, v, v_stride, positions, slots, pages: DraftPages, COLUMNS: tl.constexpr):
    """A program a row [HEADS, D]; of a row whose slot is below 0 nothing is stored."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if slot >= 0:
        D: tl.constexpr = pages.D
        PAGE: tl.constexpr = pages.PAGE
        columns = tl.arange(0, COLUMNS)
        inside = columns < pages.HEADS * D
        entry = page_entry(position // PAGE, pages.FIRST, pages.ENTRIES)
        number = tl.load(pages.table + slot * pages.table_stride + entry)
        at = number.to(tl.int64) * pages.stride + (columns // D * PAGE + position % PAGE) * D + columns % D
        own = row.to(tl.int64)
        tl.store(pages.k + at, tl.load(k + own * k_stride + columns, mask=inside), mask=inside)
        tl.store(pages.v + at, tl.load(v + own * v_stride + columns, mask=inside), mask=inside)


@triton.jit
def add_keys(q, k, v, seen, numerator, total, maximum, scale):
    """One tile of keys: `seen` [ROWS, KEYS] or [1, KEYS]."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    raised = tl.maximum(maximum, tl.max(scores, 1))
    reference = tl.where(raised == -float("inf"), 0.0, raised)  # so that no inf - inf arises
    weights, decay = tl.exp2(scores - reference[:, None]), tl.exp2(maximum - reference)
    total = total * decay + tl.sum(weights, 1)
    numerator = numerator * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return numerator, total, raised


@triton.jit(do_not_specialize_on_alignment=["slots", "anchors"])
def attend_blocks(
    blocks: Blocks,
    slots,
    anchors,
    pages: DraftPages,
    output,  # [S, B, Hq, D]; of several parts float32 [S, B, Hq, PARTS, D]
    maxima,  # float32 [S, B, Hq, PARTS], of scores times log2(e)
    sums,
    scale,  # of scores, times log2(e)
    WINDOW: tl.constexpr,  # 0: none
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,  # of the keys of a block
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,  # at least the rows of a block
):
    """A program has ROWS of the query rows of one block and one head of keys, over one part of the keys before the
    block; the first part's program has those of the block as well."""
    launch_dependents()
    wait_for_prerequisites()
    B: tl.constexpr = blocks.ROWS
    GROUP: tl.constexpr = blocks.GROUP
    HEADS: tl.constexpr = pages.HEADS
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    TILES: tl.constexpr = (B * GROUP + ROWS - 1) // ROWS
    segment, part = tl.program_id(0), tl.program_id(2)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    member = tile * ROWS + tl.arange(0, ROWS)
    wanted, row = member < B * GROUP, member // GROUP
    columns = tl.arange(0, D)
    query = (segment * B + row) * (HEADS * GROUP) + head * GROUP + member % GROUP
    q = tl.load(blocks.q + query.to(tl.int64)[:, None] * D + columns[None, :], mask=wanted[:, None], other=0.0)
    slot, anchor = tl.load(slots + segment), tl.load(anchors + segment)
    first = tl.maximum(anchor - WINDOW, 0) if WINDOW else 0
    first = tl.where(slot < 0, anchor, first)
    each = tl.cdiv(tl.cdiv(anchor - first, KEYS), PARTS) * KEYS
    begin = first + part * each
    end = tl.minimum(begin + each, anchor)
    numerator = tl.zeros([ROWS, D], tl.float32)
    total, maximum = tl.zeros([ROWS], tl.float32), tl.full([ROWS], -float("inf"), tl.float32)
    table = pages.table + slot * pages.table_stride
    for start in range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        inside = positions < end
        number = tl.load(table + page_entry(positions // PAGE, pages.FIRST, pages.ENTRIES), mask=inside, other=0)
        at = number.to(tl.int64) * pages.stride + (head * PAGE + positions % PAGE) * D
        k = tl.load(pages.k + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(pages.v + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        numerator, total, maximum = add_keys(q, k, v, inside[None, :], numerator, total, maximum, scale)
    if part == 0:
        beside = tl.arange(0, BLOCK_KEYS)
        seen = (beside < B)[None, :] & (row >= 0)[:, None]
        if CAUSAL:
            seen = seen & (beside[None, :] <= row[:, None])
        own, inside = (segment * B + beside).to(tl.int64), (beside < B)[:, None]
        k_at, v_at = (own * blocks.k_stride + head * D)[:, None], (own * blocks.v_stride + head * D)[:, None]
        k = tl.load(blocks.k + k_at + columns[None, :], mask=inside, other=0.0)
        v = tl.load(blocks.v + v_at + columns[None, :], mask=inside, other=0.0)
        numerator, total, maximum = add_keys(q, k, v, seen, numerator, total, maximum, scale)
    if PARTS == 1:
        result = numerator / total[:, None]
        tl.store(
            output + query.to(tl.int64)[:, None] * D + columns[None, :],
            result.to(output.dtype.element_ty),
            mask=wanted[:, None],
        )
    else:
        at = query.to(tl.int64) * PARTS + part
        tl.store(output + at[:, None] * D + columns[None, :], numerator, mask=wanted[:, None])
        tl.store(maxima + at, maximum, mask=wanted)
        tl.store(sums + at, total, mask=wanted)


@triton.jit
def combine_parts(numerators, maxima, sums, output, PARTS: tl.constexpr, D: tl.constexpr):
    """A program a query row and head: parts float32 [PARTS, D] of it -> `output` [D]."""
    launch_dependents()
    wait_for_prerequisites()
    row = tl.program_id(0).to(tl.int64)
    parts, columns = tl.arange(0, PARTS), tl.arange(0, D)
    values = tl.load(numerators + (row * PARTS + parts)[:, None] * D + columns[None, :])
    high = tl.load(maxima + row * PARTS + parts)
    weights = tl.exp2(high - tl.max(high, 0))  # of the block itself there is a key
    total = tl.sum(weights * tl.load(sums + row * PARTS + parts), 0)
    merged = tl.sum(values * weights[:, None], 0) / total
    tl.store(output + row * D + columns, merged.to(output.dtype.element_ty))
