"""From projections to queries and cache rows in one launch, and the late commit of a chunk's sliding rows.

`prepare` norms and rotates the query and key heads, norms the value heads, encodes keys and values in the cache's
format and stores them: into pages where `page_slots` names a slot, else into the step buffers of a sliding layer.
`commit` copies step-buffer rows into pages after the last layer that reads the old ones.

V-only rows (PAIRS > 0): keys are not stored. Rows and queries are in the order of `row_codec.v_only_columns`, and the
queries' unrotated columns carry the key norm's weight, since a reader's K is rope(weight * V).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from modelserve_worker.kernels.adapters.row_terms_triton import Term, term_factor, term_values
from modelserve_worker.kernels.attention.arguments import HeadNorms, Pages, Rotary, StepRows
from modelserve_worker.kernels.attention.triton.segment_rows import table_entry
from modelserve_worker.kernels.compiling.dependent_launch import launch_dependents, wait_for_prerequisites

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 half to even


@triton.jit
def store_values(pointers, rows, FORMAT: tl.constexpr):
    """Store float32 numbers that the format can hold, rounded to it."""
    if FORMAT == "fp8_e4m3":
        tl.store(pointers, rows.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    elif FORMAT == "fp8_e5m2":
        tl.store(pointers, rows.to(tl.float8e5).to(tl.uint8, bitcast=True))
    else:
        tl.store(pointers, rows.to(pointers.dtype.element_ty))


@triton.jit
def half_places(half, D: tl.constexpr, PAIRS: tl.constexpr):
    """Places in a stored head of columns `half` and D / 2 + `half`; PAIRS 0: the same as in the head."""
    if PAIRS:
        turned = half < PAIRS
        return tl.where(turned, D - 2 * PAIRS + half, half - PAIRS), tl.where(
            turned, D - PAIRS + half, D // 2 - 2 * PAIRS + half
        )
    return half, D // 2 + half


@triton.jit
def prepare(
    projected,  # [T, columns]: query heads, then key heads, then value heads (or key heads alone: K = V before norms)
    columns,  # row stride of `projected`
    term: Term,  # of adapters, to be added to it, or None
    q_out,  # [T, Q_HEADS, D]
    norms: HeadNorms,
    rotary: Rotary,
    page_slots,  # int32 [T]: slot whose page takes the row; -1: a step buffer or, for padding, nothing
    positions,  # int32 [T]
    pages: Pages,
    step_rows: StepRows,  # of a sliding layer, for rows without a page; None: there are none
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: the layer reads another's rows
    HEADS: tl.constexpr,  # heads of one program: a power of two that divides Q_HEADS and KV_HEADS
    PAIRS: tl.constexpr,  # rotated pairs of V-only rows, 0: keys are stored
    V_IS_K: tl.constexpr,  # no value projection: V is the unweighted norm of the key projection
):
    launch_dependents()
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    FORMAT: tl.constexpr = pages.FORMAT
    token = tl.program_id(0)
    first = tl.program_id(1) * HEADS  # query heads, key heads and value heads are numbered through
    heads = first + tl.arange(0, HEADS)
    half = tl.arange(0, D // 2)
    first_places, second_places = half_places(half, D, PAIRS)
    key_heads: tl.constexpr = 0 if PAIRS else KV_HEADS
    value_start: tl.constexpr = Q_HEADS + key_heads
    compute = q_out.dtype.element_ty
    is_query = first < Q_HEADS
    is_value = first >= value_start
    values_at: tl.constexpr = Q_HEADS if V_IS_K else Q_HEADS + KV_HEADS  # head of `projected`
    source = tl.where(heads >= value_start, heads - value_start + values_at, heads)
    inputs = projected + token.to(tl.int64) * columns + source[:, None] * D + half[None, :]
    if term is not None:
        output = source[:, None] * D + half[None, :]
        adapter = tl.load(term.row_slots + token)
        factor_1 = term_factor(term, adapter, output, output >= 0)
        factor_2 = term_factor(term, adapter, output + D // 2, output >= 0)
        at = tl.where(first >= value_start, first - value_start + values_at, first)
        part = (at >= Q_HEADS).to(tl.int32) + (at >= Q_HEADS + KV_HEADS).to(tl.int32)
    weight = norms.q_weight
    if not is_query:
        weight = norms.k_weight
    weight_1, weight_2 = tl.load(weight + half), tl.load(weight + D // 2 + half)
    if PAIRS:
        unrotated = half >= PAIRS
        key_weight_1 = tl.load(norms.k_weight + half, mask=unrotated, other=1.0)
        key_weight_2 = tl.load(norms.k_weight + D // 2 + half, mask=unrotated, other=1.0)
    c = tl.load(rotary.cos + token * (D // 2) + half)[None, :]
    s = tl.load(rotary.sin + token * (D // 2) + half)[None, :]
    if KV_HEADS:
        slot = tl.load(page_slots + token).to(tl.int64)
        position = tl.load(positions + token)
        page = tl.load(table_entry(pages, slot, position // PAGE), mask=slot >= 0, other=0).to(tl.int64)
    wait_for_prerequisites()
    x1 = tl.load(inputs).to(tl.float32)
    x2 = tl.load(inputs + D // 2).to(tl.float32)
    if term is not None:
        x1 = (x1 + term_values(term, factor_1, adapter, token, part)).to(compute).to(tl.float32)
        x2 = (x2 + term_values(term, factor_2, adapter, token, part)).to(compute).to(tl.float32)
    mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D
    inverse = tl.rsqrt(mean + norms.eps)[:, None]
    x1, x2 = x1 * inverse, x2 * inverse
    if not is_value:
        x1 = (x1 * weight_1.to(tl.float32)[None, :]).to(compute).to(tl.float32)
        x2 = (x2 * weight_2.to(tl.float32)[None, :]).to(compute).to(tl.float32)
        x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    if is_query:
        if PAIRS:
            x1 *= key_weight_1.to(tl.float32)[None, :]
            x2 *= key_weight_2.to(tl.float32)[None, :]
        outputs = q_out + (token * Q_HEADS).to(tl.int64) * D + heads[:, None] * D
        tl.store(outputs + first_places[None, :], x1.to(compute))
        tl.store(outputs + second_places[None, :], x2.to(compute))
    elif KV_HEADS:
        # What is stored is the rounded row of the compute dtype, as every plain reader has it.
        x1, x2 = x1.to(compute).to(tl.float32), x2.to(compute).to(tl.float32)
        kv = heads - Q_HEADS
        plane, plane_scales = pages.k, pages.k_scales
        if is_value:
            kv = heads - value_start
            plane, plane_scales = pages.v, pages.v_scales
        scale = tl.zeros([HEADS], tl.float16)
        if FORMAT == "int8":
            broken = (
                mean != mean
            )  # of one NaN the norm has made a row of NaN, which integers cannot say: its scale does
            x1, x2 = tl.where(broken[:, None], 0.0, x1), tl.where(broken[:, None], 0.0, x2)
            largest = tl.maximum(tl.max(tl.abs(x1), 1), tl.max(tl.abs(x2), 1))
            scale = tl.minimum(tl.div_rn(largest, tl.full([HEADS], 127.0, tl.float32)), 65504.0).to(tl.float16)
            divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)[:, None]
            x1 = tl.where(scale[:, None] > 0, tl.div_rn(x1, divisor + x1 * 0), 0.0)
            x2 = tl.where(scale[:, None] > 0, tl.div_rn(x2, divisor + x2 * 0), 0.0)
            x1 = tl.minimum(tl.maximum((x1 + ROUND) - ROUND, -127.0), 127.0)
            x2 = tl.minimum(tl.maximum((x2 + ROUND) - ROUND, -127.0), 127.0)
            scale = tl.where(broken, float("nan"), scale)
        if FORMAT == "fp8_e4m3":
            x1 = tl.clamp(x1, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            x2 = tl.clamp(x2, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if FORMAT == "fp8_e5m2":
            x1 = tl.clamp(x1, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
            x2 = tl.clamp(x2, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
        if slot >= 0:
            places = kv * PAGE + position % PAGE
            target = plane + page * pages.stride + places[:, None] * D
            store_values(target + first_places[None, :], x1, FORMAT)
            store_values(target + second_places[None, :], x2, FORMAT)
            if FORMAT == "int8":
                tl.store(plane_scales + page * pages.scale_stride + places, scale)
        elif step_rows is not None:
            plane, plane_scales = step_rows.k, step_rows.k_scales
            if is_value:
                plane, plane_scales = step_rows.v, step_rows.v_scales
            waiting = token.to(tl.int64) * KV_HEADS + kv
            waiting_rows = plane + waiting[:, None] * D
            store_values(waiting_rows + first_places[None, :], x1, FORMAT)
            store_values(waiting_rows + second_places[None, :], x2, FORMAT)
            if FORMAT == "int8":
                tl.store(plane_scales + waiting, scale)


@triton.jit
def commit(
    step_rows: StepRows,
    commit_slots,  # int32 [T]: slot whose page takes the row, -1: none
    positions,
    pages: Pages,
    HEADS: tl.constexpr,  # those of `pages` rounded up to a power of two
):
    launch_dependents()
    D: tl.constexpr = pages.D
    PAGE: tl.constexpr = pages.PAGE
    token = tl.program_id(0)
    slot = tl.load(commit_slots + token).to(tl.int64)
    position = tl.load(positions + token)
    page = tl.load(table_entry(pages, slot, position // PAGE), mask=slot >= 0, other=0).to(tl.int64)
    wait_for_prerequisites()
    if slot < 0:
        return
    heads, columns = tl.arange(0, HEADS), tl.arange(0, D)
    wanted = (heads < pages.HEADS)[:, None]
    places = heads * PAGE + position % PAGE
    sources = (token.to(tl.int64) * pages.HEADS + heads)[:, None] * D + columns[None, :]
    target = page * pages.stride + places[:, None] * D + columns[None, :]
    tl.store(pages.k + target, tl.load(step_rows.k + sources, mask=wanted), mask=wanted)
    tl.store(pages.v + target, tl.load(step_rows.v + sources, mask=wanted), mask=wanted)
    if pages.FORMAT == "int8":
        inside = heads < pages.HEADS
        scale_at = token.to(tl.int64) * pages.HEADS + heads
        to = page * pages.scale_stride + places
        tl.store(pages.k_scales + to, tl.load(step_rows.k_scales + scale_at, mask=inside), mask=inside)
        tl.store(pages.v_scales + to, tl.load(step_rows.v_scales + scale_at, mask=inside), mask=inside)
