"""Chunk attention: many query tokens of a request at once, over pages and, in sliding layers, the step's own rows.

A block of BLOCK_M query rows is BLOCK_M / GROUP tokens times the GROUP query heads of one KV head, so that one tile of
keys serves all of them. Global layers have written the step's rows to pages before. Sliding layers read the positions
before the chunk from pages and the chunk's own rows from the step buffers, because a page may be about to be reused.
What rows see behind them there is always in the step buffers: a span is never cut.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention.arguments import Pages, StepRows
from modelserve_worker.kernels.attention.triton.decode_attention_triton import LOG2_E, column_block, natural_columns
from modelserve_worker.kernels.attention.triton.segment_rows import table_entry
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.step import SegmentColumns


@triton.jit
def stored_to(values, compute: tl.constexpr, FORMAT: tl.constexpr):
    """Elements of a cache row as they come from memory -> numbers of the compute dtype, before any scale."""
    if FORMAT == "fp8_e4m3":
        return values.to(tl.float8e4nv, bitcast=True).to(compute)
    if FORMAT == "fp8_e5m2":
        return values.to(tl.float8e5, bitcast=True).to(compute)
    return values.to(compute)


@triton.jit
def chunk_of(ends, number):
    """The chunk that the block or page `number` belongs to, by running sums int32 [CHUNKS], and its number there."""
    before = ends <= number
    return tl.sum(before.to(tl.int32)), number - tl.max(tl.where(before, ends, 0))


@triton.jit
def either(first, of_first, of_second, BYTES: tl.constexpr):
    """Addresses: those `of_first` where `first`, else `of_second`. All are multiples of BYTES, which casts forget."""
    kind: tl.constexpr = of_first.dtype.scalar
    chosen = tl.where(first, of_first.to(tl.int64), of_second.to(tl.int64))
    return tl.multiple_of(chosen.to(kind), BYTES)


@triton.jit
def softmax_step(scores, maximum, total):
    """One tile of the online softmax: weights, decay of what was summed before, new maximum and sum (base 2)."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)  # a row that has seen no key yet
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(maximum - reference)
    return weights, decay, new_maximum, total * decay + tl.sum(weights, 1)


@triton.jit
def global_chunk(
    q,  # [T, HEADS * GROUP, D]
    output,  # like q
    chunks: SegmentColumns,  # of [CHUNKS]
    block_ends,  # int32 [CHUNKS] running sum of blocks
    key_rows,  # int32 [CHUNKS]: where each chunk's keys begin in dense pages
    pages: Pages,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,  # `pages` are those that `expand_keys` wrote
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    compute: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP
    tiles_per_page: tl.constexpr = PAGE // TILE
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block = tl.max(ends) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    if block < 0:
        return
    chunk, own_block = chunk_of(ends, block)
    first = own_block * tokens_per_block
    start = tl.load(chunks.starts + chunk)
    length = tl.load(chunks.lengths + chunk)
    slot = tl.load(chunks.slots + chunk).to(tl.int64)
    members = tl.arange(0, BLOCK_M)
    token = first + members // GROUP
    wanted = (token < length)[:, None]
    at = start + token
    columns = tl.arange(0, D)
    offsets = tl.arange(0, TILE)
    row = (tl.load(chunks.firsts + chunk) + token).to(tl.int64)
    places = ((row * pages.HEADS + head) * GROUP + members % GROUP)[:, None] * D
    queries = tl.load(q + places + columns[None, :], mask=wanted, other=0.0)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, D], tl.float32)
    first_page = (tl.load(key_rows + chunk) // PAGE).to(tl.int64)
    last = start + tl.minimum(first + tokens_per_block, length) - 1
    for tile in range(last // TILE + 1):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        page = first_page + tile // tiles_per_page
        if not DENSE:
            page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = page * pages.stride + tokens[:, None] * D + columns[None, :]
        keys = tl.load(pages.k + rows, mask=readable[:, None], other=0.0)
        values = tl.load(pages.v + rows, mask=readable[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys).to(compute))
        scores = tl.where(keys_at[None, :] <= at[:, None], scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = softmax_step(scores, maximum, total)
        result = tl.dot(weights.to(compute), values.to(compute), result * decay[:, None])
    result = result / total[:, None]
    tl.store(output + places + columns[None, :], result.to(compute), mask=wanted)


@triton.jit
def global_chunk_v_only(
    q,
    output,
    chunks: SegmentColumns,
    block_ends,
    key_rows,  # int32 [CHUNKS]: row of `rotated_keys` of each chunk's position 0
    pages: Pages,
    rotated_keys,  # [keys, HEADS, 2 * PAIRS]: the columns of K that rotation changes
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    compute: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP
    tiles_per_page: tl.constexpr = PAGE // TILE
    wide: tl.constexpr = D // 2  # unrotated columns, in two blocks of a power of two
    narrow: tl.constexpr = D // 2 - 2 * PAIRS
    pairs: tl.constexpr = 2 * PAIRS  # the rotated columns, last
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block = tl.max(ends) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    if block < 0:
        return
    chunk, own_block = chunk_of(ends, block)
    first = own_block * tokens_per_block
    start = tl.load(chunks.starts + chunk)
    length = tl.load(chunks.lengths + chunk)
    slot = tl.load(chunks.slots + chunk).to(tl.int64)
    members, offsets = tl.arange(0, BLOCK_M), tl.arange(0, TILE)
    token = first + members // GROUP
    wanted = (token < length)[:, None]
    at = start + token
    row = (tl.load(chunks.firsts + chunk) + token).to(tl.int64)
    places = ((row * pages.HEADS + head) * GROUP + members % GROUP)[:, None] * D
    turned = tl.arange(0, pairs)
    first_key = tl.load(key_rows + chunk).to(tl.int64)
    first_page = first_key // PAGE
    turned_rows = rotated_keys + (first_key * pages.HEADS + head) * pairs
    qw = column_block(q + places, 0, token < length, wide)
    qn = column_block(q + places, wide, token < length, narrow)
    qp = column_block(q + places, D - pairs, token < length, pairs)
    ow = tl.zeros([BLOCK_M, wide], tl.float32)
    on = tl.zeros([BLOCK_M, narrow], tl.float32)
    op = tl.zeros([BLOCK_M, pairs], tl.float32)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = start + tl.minimum(first + tokens_per_block, length) - 1
    key_places = offsets[:, None] * (pages.HEADS * pairs) + turned[None, :]
    for tile in range(last // TILE + 1):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        page = first_page + tile // tiles_per_page
        if not DENSE:
            page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = pages.v + page * pages.stride + tokens[:, None] * D
        turned_keys = turned_rows + tile * (TILE * pages.HEADS * pairs) + key_places
        keys = tl.load(turned_keys, mask=readable[:, None], other=0.0)
        vw = column_block(rows, 0, readable, wide)
        vn = column_block(rows, wide, readable, narrow)
        vp = column_block(rows, D - pairs, readable, pairs)
        scores = tl.dot(qw, tl.trans(vw).to(compute))
        scores = tl.dot(qn, tl.trans(vn).to(compute), scores)
        scores = tl.dot(qp, tl.trans(keys), scores)
        scores = tl.where(keys_at[None, :] <= at[:, None], scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = softmax_step(scores, maximum, total)
        p = weights.to(compute)
        decay = decay[:, None]
        ow = tl.dot(p, vw.to(compute), ow * decay)
        on = tl.dot(p, vn.to(compute), on * decay)
        op = tl.dot(p, vp.to(compute), op * decay)
    inverse = 1.0 / total[:, None]
    target = output + places
    first, second, third = tl.arange(0, wide), wide + tl.arange(0, narrow), D - pairs + turned
    tl.store(target + natural_columns(first, D, PAIRS)[None, :], (ow * inverse).to(compute), mask=wanted)
    tl.store(target + natural_columns(second, D, PAIRS)[None, :], (on * inverse).to(compute), mask=wanted)
    tl.store(target + natural_columns(third, D, PAIRS)[None, :], (op * inverse).to(compute), mask=wanted)


@triton.jit
def sliding_chunk(
    q,
    output,
    step_rows: StepRows,
    chunks: SegmentColumns,
    block_ends,
    pages: Pages,
    last_keys,  # int32 [T] the last position that each row sees; None: its own
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A row sees no key behind its own or, where rows of images see each other, behind its one of `last_keys`. Blocks
    whose rows see no further than themselves have the same bits with `last_keys` and without."""
    launch_dependents()
    wait_for_prerequisites()
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block, head = tl.program_id(0), tl.program_id(1)
    if block >= tl.max(ends):
        return
    compute: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    WINDOW: tl.constexpr = pages.WINDOW
    FORMAT: tl.constexpr = pages.FORMAT
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP
    chunk, own_block = chunk_of(ends, block)
    first = own_block * tokens_per_block
    start = tl.load(chunks.starts + chunk)
    length = tl.load(chunks.lengths + chunk)
    slot = tl.load(chunks.slots + chunk).to(tl.int64)
    chunk_row = tl.load(chunks.firsts + chunk)
    members = tl.arange(0, BLOCK_M)
    token = first + members // GROUP
    wanted = (token < length)[:, None]
    at = start + token
    until = at
    if last_keys is not None:
        until = tl.load(last_keys + chunk_row + token, mask=token < length, other=0)
    columns = tl.arange(0, D)
    offsets = tl.arange(0, TILE)
    row = (chunk_row + token).to(tl.int64)
    places = ((row * pages.HEADS + head) * GROUP + members % GROUP)[:, None] * D
    queries = tl.load(q + places + columns[None, :], mask=wanted, other=0.0)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, D], tl.float32)
    oldest = tl.maximum(start + first - WINDOW + 1, 0)
    last = tl.minimum(first + tokens_per_block, length)  # rows of the chunk that this block's queries see
    if last_keys is not None:
        last = tl.maximum(tl.max(until) + 1 - start, last)
    # Tiles begin at multiples of their size, wherever the chunk begins. A tile may lie in pages and in the step's rows.
    for tile in range(oldest // TILE, tl.cdiv(start + last, TILE)):
        keys_at = tile * TILE + offsets
        own = keys_at - start
        old, fresh = (keys_at >= oldest) & (own < 0), (own >= 0) & (own < last)
        readable = old | fresh
        page = tl.load(table_entry(pages, slot, keys_at // PAGE), mask=old, other=0).to(tl.int64)
        tokens = head * PAGE + keys_at % PAGE
        own_rows = (chunk_row + own).to(tl.int64) * pages.HEADS + head
        page_rows = page * pages.stride + tokens * D
        k_rows = either(fresh, step_rows.k + own_rows * D, pages.k + page_rows, 16)
        v_rows = either(fresh, step_rows.v + own_rows * D, pages.v + page_rows, 16)
        keys = tl.load(k_rows[:, None] + columns[None, :], mask=readable[:, None], other=0.0)
        values = tl.load(v_rows[:, None] + columns[None, :], mask=readable[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(stored_to(keys, compute, FORMAT)))
        if FORMAT == "int8":
            scale_rows = page * pages.scale_stride + tokens
            k_scales = either(fresh, step_rows.k_scales + own_rows, pages.k_scales + scale_rows, 2)
            v_scales = either(fresh, step_rows.v_scales + own_rows, pages.v_scales + scale_rows, 2)
            scores = scores * tl.load(k_scales, mask=readable, other=0.0).to(tl.float32)[None, :]
            v_scale = tl.load(v_scales, mask=readable, other=0.0).to(tl.float32)
        seen = readable[None, :] & (keys_at[None, :] <= until[:, None]) & (keys_at[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = softmax_step(scores, maximum, total)
        if FORMAT == "int8":
            weights = weights * v_scale[None, :]
        result = tl.dot(weights.to(compute), stored_to(values, compute, FORMAT), result * decay[:, None])
    result = result / total[:, None]
    tl.store(output + places + columns[None, :], result.to(compute), mask=wanted)
