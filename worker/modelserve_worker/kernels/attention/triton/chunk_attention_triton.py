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

from modelserve_worker.kernels.attention.triton.decode_attention_triton import LOG2_E, column_block, natural_columns
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites


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
    q,  # [T, KV_HEADS * GROUP, D]
    output,  # like q
    chunk_rows,  # int32 [CHUNKS] row of T of each chunk's first token
    chunk_starts,  # int32 [CHUNKS] its position
    chunk_lengths,  # int32 [CHUNKS]
    chunk_slots,  # int32 [CHUNKS]
    block_ends,  # int32 [CHUNKS] running sum of blocks
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
    key_rows,  # int32 [CHUNKS]: where each chunk's keys begin in dense pages
    CHUNKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,  # `arena` is the pages that `expand_keys` wrote
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    compute: tl.constexpr = q.dtype.element_ty
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP
    tiles_per_page: tl.constexpr = PAGE // TILE
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block = tl.max(ends) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    if block < 0:
        return
    chunk, own_block = chunk_of(ends, block)
    first = own_block * tokens_per_block
    start = tl.load(chunk_starts + chunk)
    length = tl.load(chunk_lengths + chunk)
    slot = tl.load(chunk_slots + chunk).to(tl.int64)
    members = tl.arange(0, BLOCK_M)
    token = first + members // GROUP
    wanted = (token < length)[:, None]
    at = start + token
    columns = tl.arange(0, D)
    offsets = tl.arange(0, TILE)
    row = (tl.load(chunk_rows + chunk) + token).to(tl.int64)
    places = ((row * KV_HEADS + head) * GROUP + members % GROUP)[:, None] * D
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
            page = tl.load(table + slot * table_stride + tile // tiles_per_page).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = arena + origin + page * page_stride + tokens[:, None] * D + columns[None, :]
        keys = tl.load(rows + k_offset, mask=readable[:, None], other=0.0)
        values = tl.load(rows + v_offset, mask=readable[:, None], other=0.0)
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
    key_rows,  # int32 [CHUNKS]: row of `rotated_keys` of each chunk's position 0
    rotated_keys,  # [keys, KV_HEADS, 2 * PAIRS]: the columns of K that rotation changes
    CHUNKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    launch_dependents()
    wait_for_prerequisites()
    compute: tl.constexpr = q.dtype.element_ty
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
    start = tl.load(chunk_starts + chunk)
    length = tl.load(chunk_lengths + chunk)
    slot = tl.load(chunk_slots + chunk).to(tl.int64)
    members, offsets = tl.arange(0, BLOCK_M), tl.arange(0, TILE)
    token = first + members // GROUP
    wanted = (token < length)[:, None]
    at = start + token
    row = (tl.load(chunk_rows + chunk) + token).to(tl.int64)
    places = ((row * KV_HEADS + head) * GROUP + members % GROUP)[:, None] * D
    turned = tl.arange(0, pairs)
    first_key = tl.load(key_rows + chunk).to(tl.int64)
    first_page = first_key // PAGE
    turned_rows = rotated_keys + (first_key * KV_HEADS + head) * pairs
    qw = column_block(q + places, 0, token < length, wide)
    qn = column_block(q + places, wide, token < length, narrow)
    qp = column_block(q + places, D - pairs, token < length, pairs)
    ow = tl.zeros([BLOCK_M, wide], tl.float32)
    on = tl.zeros([BLOCK_M, narrow], tl.float32)
    op = tl.zeros([BLOCK_M, pairs], tl.float32)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = start + tl.minimum(first + tokens_per_block, length) - 1
    key_places = offsets[:, None] * (KV_HEADS * pairs) + turned[None, :]
    for tile in range(last // TILE + 1):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        page = first_page + tile // tiles_per_page
        if not DENSE:
            page = tl.load(table + slot * table_stride + tile // tiles_per_page).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = arena + origin + page * page_stride + v_offset + tokens[:, None] * D
        turned_keys = turned_rows + tile * (TILE * KV_HEADS * pairs) + key_places
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
    last_keys,  # int32 [T] the last position that each row sees; None: its own
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
    """A row sees no key behind its own or, where rows of images see each other, behind its one of `last_keys`. Blocks
    whose rows see no further than themselves have the same bits with `last_keys` and without."""
    launch_dependents()
    wait_for_prerequisites()
    ends = tl.load(block_ends + tl.arange(0, CHUNKS))
    block, head = tl.program_id(0), tl.program_id(1)
    if block >= tl.max(ends):
        return
    compute: tl.constexpr = q.dtype.element_ty
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP
    chunk, own_block = chunk_of(ends, block)
    first = own_block * tokens_per_block
    start = tl.load(chunk_starts + chunk)
    length = tl.load(chunk_lengths + chunk)
    slot = tl.load(chunk_slots + chunk).to(tl.int64)
    chunk_row = tl.load(chunk_rows + chunk)
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
    places = ((row * KV_HEADS + head) * GROUP + members % GROUP)[:, None] * D
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
        page = tl.load(table + slot * table_stride + (keys_at // PAGE) % ENTRIES, mask=old, other=0).to(tl.int64)
        tokens = head * PAGE + keys_at % PAGE
        own_rows = (chunk_row + own).to(tl.int64) * KV_HEADS + head
        page_rows = origin + page * page_stride + tokens * D
        k_rows = either(fresh, step_k + own_rows * D, arena + page_rows + k_offset, 16)
        v_rows = either(fresh, step_v + own_rows * D, arena + page_rows + v_offset, 16)
        keys = tl.load(k_rows[:, None] + columns[None, :], mask=readable[:, None], other=0.0)
        values = tl.load(v_rows[:, None] + columns[None, :], mask=readable[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(stored_to(keys, compute, FORMAT)))
        if FORMAT == "scaled_int8":
            scale_rows = scale_origin + page * scale_stride + tokens
            k_scales = either(fresh, step_k_scale + own_rows, scales + scale_rows + k_scale_offset, 2)
            v_scales = either(fresh, step_v_scale + own_rows, scales + scale_rows + v_scale_offset, 2)
            scores = scores * tl.load(k_scales, mask=readable, other=0.0).to(tl.float32)[None, :]
            v_scale = tl.load(v_scales, mask=readable, other=0.0).to(tl.float32)
        seen = readable[None, :] & (keys_at[None, :] <= until[:, None]) & (keys_at[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2_E, -float("inf"))
        weights, decay, maximum, total = softmax_step(scores, maximum, total)
        if FORMAT == "scaled_int8":
            weights = weights * v_scale[None, :]
        result = tl.dot(weights.to(compute), stored_to(values, compute, FORMAT), result * decay[:, None])
    result = result / total[:, None]
    tl.store(output + places + columns[None, :], result.to(compute), mask=wanted)
