"""Parts of attention kernels: which rows, pages and keys are a program's own."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.compiling.dependent_launch import prefetch


@triton.jit
def table_entry(pages, slot, page):
    """Pointers to the numbers in the pool of a slot's pages, each the `page`-th of its context."""
    if pages.ENTRIES:
        page = page % pages.ENTRIES
    return pages.table + slot * pages.table_stride + page


@triton.jit
def segment_of(segments, segment, ROWS: tl.constexpr):
    """Position of a segment's first row, or -1 for padding, that of its last, and the step's row that is the first."""
    start = tl.load(segments.starts + segment)
    last, row = start, segment
    if ROWS > 1:
        last, row = start + tl.load(segments.lengths + segment) - 1, tl.load(segments.firsts + segment)
    return start, last, row


@triton.jit
def split_range(
    start, last, split, PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLIT_PAGES: tl.constexpr, MOST_SPLITS: tl.constexpr
):
    """First page of a split and the page after its last one; empty when the segment has fewer splits."""
    first_page = 0
    if WINDOW:
        first_page = tl.maximum(start - WINDOW + 1, 0) // PAGE
    pages = last // PAGE - first_page + 1
    per_split = tl.maximum(SPLIT_PAGES, tl.cdiv(pages, MOST_SPLITS))
    begin = first_page + split * per_split
    return begin, tl.minimum(begin + per_split, first_page + pages)


@triton.jit
def own_split(segments, pages, splits, SPLIT_PAGES: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr):
    """What a program of a split decode works on: KV head, split, slot (int64), `segment_of` of its PART of ROWS rows,
    pages [begin, end), and whether it has rows and pages at all."""
    head, split, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, last, row = segment_of(segments, segment, ROWS)
    slot = tl.load(segments.slots + segment).to(tl.int64)
    begin, end = split_range(start, last, split, pages.PAGE, pages.WINDOW, SPLIT_PAGES, splits.MOST)
    active = (begin < end) & (start >= 0)
    if PART < ROWS:
        head, part = head % pages.HEADS, head // pages.HEADS
        start, row = start + part * PART, row + part * PART
        last = tl.minimum(last, start + PART - 1)
        active = active & (start <= last)
    return head, split, slot, start, last, row, begin, end, active


@triton.jit
def query_rows(q, splits, row, head, members, ROWS: tl.constexpr):
    """Pointers [BLOCK_M, 1] to the queries of one KV head: GROUP of a row, then those of the next row."""
    GROUP: tl.constexpr = splits.GROUP
    D: tl.constexpr = splits.D
    pointers = q + (row * splits.HEADS + head).to(tl.int64) * GROUP * D
    if ROWS > 1:
        pointers += (members[:, None] // GROUP) * (splits.HEADS * GROUP * D) + (members[:, None] % GROUP) * D
    else:
        pointers += members[:, None] * D
    return pointers


@triton.jit
def result_rows(splits, row, split, head, members, ROWS: tl.constexpr):
    """Places [BLOCK_M] of a program's results in [rows, MOST, HEADS, GROUP]."""
    GROUP: tl.constexpr = splits.GROUP
    places = ((row * splits.MOST + split) * splits.HEADS + head) * GROUP
    if ROWS > 1:
        places += members // GROUP * (splits.MOST * splits.HEADS * GROUP) + members % GROUP
    else:
        places += members
    return places


@triton.jit
def visible_keys(keys_at, readable, start, members, GROUP: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Which keys of a tile [TILE], of those that some row reads, each query sees: [BLOCK_M or 1, TILE]."""
    visible = readable[None, :]
    if ROWS > 1:
        at = (start + members // GROUP)[:, None]
        visible = visible & (keys_at[None, :] <= at)
        if WINDOW:
            visible = visible & (keys_at[None, :] > at - WINDOW)
    return visible


@triton.jit
def prefetch_page(plane, wanted, ELEMENTS: tl.constexpr):
    """One head's rows of a page, which lie side by side: a split's first, while `prepare` still makes the queries."""
    line: tl.constexpr = 1024 // plane.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    prefetch(plane + tl.arange(0, ELEMENTS // line) * line, wanted)


@triton.jit
def online_softmax(scores, maximum, total, ROWS: tl.constexpr):
    """One tile: weights, decay of earlier sums, new maximum and sum (base 2). A lone row sees a key of every tile."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    reference = new_maximum
    if ROWS > 1:
        reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(maximum - reference)
    return weights, decay, new_maximum, total * decay + tl.sum(weights, 1)
