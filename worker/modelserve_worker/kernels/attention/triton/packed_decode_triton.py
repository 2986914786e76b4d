"""Decode attention over 8-bit rows: the kernels of `decode_attention_triton`, reading 16-bit pairs of columns.

Copies to shared memory and the loads of matrix operands from it know 16-bit elements; a tile of 8-bit ones would be
converted element by element and staged again. So pages are viewed as int16, element numbers count pairs, and a
packed tile becomes two tiles in registers, of the even and of the odd columns. Unpacked numbers are smaller than the
row's by `unit_of` the format, which makes the conversion a few exact bit operations, subnormals included (not e4m3's
NaN, which no row holds). Other arguments and the results are those of the other kernels.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.attention.arguments import Pages, Splits, Turns
from modelserve_worker.kernels.attention.triton.decode_attention_triton import LOG2_E, column_block
from modelserve_worker.kernels.attention.triton.segment_rows import (
    online_softmax,
    own_split,
    prefetch_page,
    query_rows,
    result_rows,
    table_entry,
    visible_keys,
)
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_what_is_read
from modelserve_worker.kernels.step import SegmentColumns

# Two pairs in one register, low byte first. int8: (byte ^ 0x80) as the mantissa of 8.0 is 8 + u / 128; minus 9.
INT8_PAIRS = tl.constexpr("""{
.reg .b32 x, nine;
mov.b32 nine, 0x48804880;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, 0x48484848, 0x4240;
prmt.b32 $1, x, 0x48484848, 0x4341;
sub.f16x2 $0, $0, nine;
sub.f16x2 $1, $1, nine;
}""")
E4M3_PAIRS = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $2, 8;
shl.b32 b, $2, 7;
and.b32 a, a, 0x80008000;
lop3.b32 $0, b, 0x3f803f80, a, 0xea;
shr.u32 b, $2, 1;
and.b32 a, $2, 0x80008000;
lop3.b32 $1, b, 0x3f803f80, a, 0xea;
}""")
E5M2_PAIRS = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xff00ff00;
}""")


@triton.jit
def unit_of(FORMAT: tl.constexpr):
    """What an unpacked number is multiplied by to give the row's element."""
    return 128.0 if FORMAT == "int8" else 256.0 if FORMAT == "fp8_e4m3" else 1.0


@triton.jit
def byte_values(byte, FORMAT: tl.constexpr):
    """One 8-bit element in the low bits of an int16 -> float16, `unit_of` times smaller."""
    if FORMAT == "int8":
        return (((byte ^ 0x80) & 0xFF) | 0x4800).to(tl.int16).to(tl.float16, bitcast=True) - 9.0
    if FORMAT == "fp8_e4m3":
        return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return ((byte & 0xFF) << 8).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpacked(pairs, compute: tl.constexpr, FORMAT: tl.constexpr):
    """int16 tile -> (even columns, odd columns) of dtype `compute`, float16 or float32."""
    if compute == tl.float16:
        fp8: tl.constexpr = E4M3_PAIRS if FORMAT == "fp8_e4m3" else E5M2_PAIRS
        asm: tl.constexpr = INT8_PAIRS if FORMAT == "int8" else fp8
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return byte_values(pairs, FORMAT).to(compute), byte_values(pairs >> 8, FORMAT).to(compute)


@triton.jit
def query_columns(rows, start: tl.constexpr, wanted, COLUMNS: tl.constexpr, compute: tl.constexpr):
    """Even and odd columns of [start, start + 2 * COLUMNS) of rows of pointers [N, 1]."""
    at = rows + start + 2 * tl.arange(0, COLUMNS)[None, :]
    even = tl.load(at, mask=wanted[:, None], other=0.0, cache_modifier=".cg")
    odd = tl.load(at + 1, mask=wanted[:, None], other=0.0, cache_modifier=".cg")
    return even.to(compute), odd.to(compute)


@triton.jit
def store_columns(rows, start: tl.constexpr, even, odd, wanted):
    """The reverse of `query_columns`."""
    at = rows + start + 2 * tl.arange(0, even.shape[1])[None, :]
    tl.store(at, even.to(rows.dtype.element_ty), mask=wanted[:, None])
    tl.store(at + 1, odd.to(rows.dtype.element_ty), mask=wanted[:, None])


@triton.jit
def scored(queries_even, queries_odd, pairs, compute: tl.constexpr, FORMAT: tl.constexpr):
    """Queries times a packed tile of keys [keys, columns / 2] -> [queries, keys], `unit_of` times smaller."""
    even, odd = unpacked(tl.trans(pairs), compute, FORMAT)
    return tl.dot(queries_even, even) + tl.dot(queries_odd, odd)


@triton.jit
def summed(p, pairs, even, odd, compute: tl.constexpr, FORMAT: tl.constexpr):
    """Add weights times a packed tile of values to the even and odd columns of an output."""
    values_even, values_odd = unpacked(pairs, compute, FORMAT)
    return tl.dot(p, values_even, even), tl.dot(p, values_odd, odd)


@triton.jit
def split_decode_packed(
    q,
    splits: Splits,
    segments: SegmentColumns,
    pages: Pages,  # an element is two of a row's, an int16
    TILE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BESIDE: tl.constexpr,
):
    launch_dependents()
    compute: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    FORMAT: tl.constexpr = pages.FORMAT
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    tiles_per_page: tl.constexpr = PAGE // TILE
    packed: tl.constexpr = D // 2
    head, split, slot, start, last, row, begin, end, active = own_split(
        segments, pages, splits, SPLIT_PAGES, ROWS, PART
    )
    first_page = tl.load(table_entry(pages, slot, begin), mask=active, other=0).to(tl.int64)
    plane = first_page * pages.stride + head * (PAGE * packed)
    prefetch_page(pages.k + plane, active, PAGE * packed)
    prefetch_page(pages.v + plane, active, PAGE * packed)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, columns, offsets = tl.arange(0, BLOCK_M), tl.arange(0, packed), tl.arange(0, TILE)
    wanted = members < splits.GROUP * (last - start + 1)
    q_rows = query_rows(q, splits, row, head, members, ROWS)
    q_even, q_odd = query_columns(q_rows, 0, wanted, packed, compute)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    even = tl.zeros([BLOCK_M, packed], tl.float32)
    odd = tl.zeros([BLOCK_M, packed], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, last // TILE + 1)):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        if pages.WINDOW:
            readable = readable & (keys_at > start - pages.WINDOW)
        page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = page * pages.stride + tokens[:, None] * packed + columns[None, :]
        keys = tl.load(pages.k + rows, mask=readable[:, None], other=0, cache_modifier=".cg")
        values = tl.load(pages.v + rows, mask=readable[:, None], other=0, cache_modifier=".cg")
        factor = LOG2_E * unit_of(FORMAT)
        scores = scored(q_even, q_odd, keys, compute, FORMAT)
        if FORMAT == "int8":
            scale_rows = page * pages.scale_stride + tokens
            scale = tl.load(pages.k_scales + scale_rows, mask=readable, other=0.0, cache_modifier=".cg")
            scores *= scale.to(tl.float32)[None, :]
        visible = visible_keys(keys_at, readable, start, members, splits.GROUP, pages.WINDOW, ROWS)
        scores = tl.where(visible, scores * factor, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total, ROWS)
        if FORMAT == "int8":  # times 128: rows are normed, so the product is about the row's largest number
            scale = tl.load(pages.v_scales + scale_rows, mask=readable, other=0.0, cache_modifier=".cg").to(tl.float32)
            weights *= (scale * unit_of(FORMAT))[None, :]
        decay = decay[:, None]
        even, odd = summed(weights.to(compute), values, even * decay, odd * decay, compute, FORMAT)
    unit = 1.0 if FORMAT == "int8" else unit_of(FORMAT)  # int8: in the weights already
    result = result_rows(splits, row, split, head, members, ROWS)
    store_columns(splits.outputs + result.to(tl.int64)[:, None] * D, 0, even * unit, odd * unit, wanted)
    tl.store(splits.maxima + result, maximum, mask=wanted)
    tl.store(splits.sums + result, total, mask=wanted)


@triton.jit
def turned_keys(first, second, weight_1, weight_2, cos, sin):
    """Rotated pairs of keys, from values."""
    k1, k2 = first * weight_1, second * weight_2
    return k1 * cos - k2 * sin, k2 * cos + k1 * sin


@triton.jit
def table_row(pointers, turned: tl.constexpr, compute: tl.constexpr):
    """Even and odd pairs of one row of a table that has the even ones first."""
    return tl.load(pointers).to(compute)[None, :], tl.load(pointers + turned).to(compute)[None, :]


@triton.jit
def split_decode_v_only_packed(
    q,
    splits: Splits,
    segments: SegmentColumns,
    pages: Pages,  # an element is two of a row's, an int16
    key_weight,
    turns: Turns,  # with the even pairs before the odd ones
    TILE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BESIDE: tl.constexpr,
):
    launch_dependents()
    compute: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    FORMAT: tl.constexpr = pages.FORMAT
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    PAIRS: tl.constexpr = turns.PAIRS
    tiles_per_page: tl.constexpr = PAGE // TILE
    packed: tl.constexpr = D // 2
    wide: tl.constexpr = D // 4  # packed unrotated columns, in two blocks of a power of two
    narrow: tl.constexpr = D // 4 - PAIRS
    turned: tl.constexpr = PAIRS // 2  # packed columns of the firsts, and of the seconds, of the rotated pairs
    head, split, slot, start, last, row, begin, end, active = own_split(
        segments, pages, splits, SPLIT_PAGES, ROWS, PART
    )
    first_page = tl.load(table_entry(pages, slot, begin), mask=active, other=0).to(tl.int64)
    prefetch_page(pages.v + first_page * pages.stride + head * (PAGE * packed), active, PAGE * packed)
    wait_for_what_is_read(BESIDE)
    if not active:
        return
    members, offsets, couples = tl.arange(0, BLOCK_M), tl.arange(0, TILE), tl.arange(0, turned)
    wanted = members < splits.GROUP * (last - start + 1)
    q_rows = query_rows(q, splits, row, head, members, ROWS)
    qw_even, qw_odd = query_columns(q_rows, 0, wanted, wide, compute)
    qn_even, qn_odd = query_columns(q_rows, 2 * wide, wanted, narrow, compute)
    q1_even, q1_odd = query_columns(q_rows, D - 2 * PAIRS, wanted, turned, compute)
    q2_even, q2_odd = query_columns(q_rows, D - PAIRS, wanted, turned, compute)
    weight_1 = key_weight + 2 * couples[None, :]
    weight_2 = weight_1 + D // 2
    w1_even, w1_odd = tl.load(weight_1).to(compute), tl.load(weight_1 + 1).to(compute)
    w2_even, w2_odd = tl.load(weight_2).to(compute), tl.load(weight_2 + 1).to(compute)
    turn = offsets[:, None] * PAIRS + couples[None, :]
    ct_even, ct_odd = tl.load(turns.turn_cos + turn).to(compute), tl.load(turns.turn_cos + turn + turned).to(compute)
    st_even, st_odd = tl.load(turns.turn_sin + turn).to(compute), tl.load(turns.turn_sin + turn + turned).to(compute)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    ow_even, ow_odd = tl.zeros([BLOCK_M, wide], tl.float32), tl.zeros([BLOCK_M, wide], tl.float32)
    on_even, on_odd = tl.zeros([BLOCK_M, narrow], tl.float32), tl.zeros([BLOCK_M, narrow], tl.float32)
    o1_even, o1_odd = tl.zeros([BLOCK_M, turned], tl.float32), tl.zeros([BLOCK_M, turned], tl.float32)
    o2_even, o2_odd = tl.zeros([BLOCK_M, turned], tl.float32), tl.zeros([BLOCK_M, turned], tl.float32)
    for tile in range(begin * tiles_per_page, tl.minimum(end * tiles_per_page, last // TILE + 1)):
        keys_at = tile * TILE + offsets
        readable = keys_at <= last
        page = tl.load(table_entry(pages, slot, tile // tiles_per_page)).to(tl.int64)
        tokens = head * PAGE + (tile % tiles_per_page) * TILE + offsets
        rows = pages.v + page * pages.stride + tokens[:, None] * packed
        vw = column_block(rows, 0, readable, wide)
        vn = column_block(rows, wide, readable, narrow)
        v1 = column_block(rows, packed - PAIRS, readable, turned)
        v2 = column_block(rows, packed - turned, readable, turned)
        first_key = tile * PAIRS + couples
        c0_even, c0_odd = table_row(turns.start_cos + first_key, turned, compute)
        s0_even, s0_odd = table_row(turns.start_sin + first_key, turned, compute)
        f_even, f_odd = unpacked(v1, compute, FORMAT)
        s_even, s_odd = unpacked(v2, compute, FORMAT)
        k1_even, k2_even = turned_keys(
            f_even,
            s_even,
            w1_even,
            w2_even,
            c0_even * ct_even - s0_even * st_even,
            s0_even * ct_even + c0_even * st_even,
        )
        k1_odd, k2_odd = turned_keys(
            f_odd, s_odd, w1_odd, w2_odd, c0_odd * ct_odd - s0_odd * st_odd, s0_odd * ct_odd + c0_odd * st_odd
        )
        scores = scored(qw_even, qw_odd, vw, compute, FORMAT) + scored(qn_even, qn_odd, vn, compute, FORMAT)
        scores += tl.dot(q1_even, tl.trans(k1_even)) + tl.dot(q1_odd, tl.trans(k1_odd))
        scores += tl.dot(q2_even, tl.trans(k2_even)) + tl.dot(q2_odd, tl.trans(k2_odd))
        if FORMAT == "int8":
            scale_rows = pages.v_scales + page * pages.scale_stride + tokens
            stored = tl.load(scale_rows, mask=readable, other=0.0, cache_modifier=".cg")
            scale = stored.to(tl.float32)[None, :] * unit_of(FORMAT)
            scores = scores * scale * LOG2_E
        else:
            scores *= LOG2_E * unit_of(FORMAT)
        visible = visible_keys(keys_at, readable, start, members, splits.GROUP, 0, ROWS)
        scores = tl.where(visible, scores, -float("inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total, ROWS)
        if FORMAT == "int8":
            weights = weights * scale
        p = weights.to(compute)
        decay = decay[:, None]
        ow_even, ow_odd = summed(p, vw, ow_even * decay, ow_odd * decay, compute, FORMAT)
        on_even, on_odd = summed(p, vn, on_even * decay, on_odd * decay, compute, FORMAT)
        o1_even, o1_odd = summed(p, v1, o1_even * decay, o1_odd * decay, compute, FORMAT)
        o2_even, o2_odd = summed(p, v2, o2_even * decay, o2_odd * decay, compute, FORMAT)
    unit = 1.0 if FORMAT == "int8" else unit_of(FORMAT)
    result = result_rows(splits, row, split, head, members, ROWS)
    target = splits.outputs + result.to(tl.int64)[:, None] * D
    store_columns(target, 0, ow_even * unit, ow_odd * unit, wanted)
    store_columns(target, 2 * wide, on_even * unit, on_odd * unit, wanted)
    store_columns(target, D - 2 * PAIRS, o1_even * unit, o1_odd * unit, wanted)
    store_columns(target, D - PAIRS, o2_even * unit, o2_odd * unit, wanted)
    tl.store(splits.maxima + result, maximum, mask=wanted)
    tl.store(splits.sums + result, total, mask=wanted)
