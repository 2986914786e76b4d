"""A product whose inputs are split over programs: who computes what, and the sum of the parts in one fixed order.

Each program leaves its part of a block in memory and counts itself in; the one that arrives last adds all parts up in
the order of the splits, stores the block and sets the counter back. So one launch is enough, and the same call gives
the same bits whoever arrives last.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_range(tiles, split, splits):
    """Tiles [begin, end) of a split; none where there are more splits than tiles."""
    share = tl.cdiv(tiles, splits)
    return split * share, tl.minimum(split * share + share, tiles)


@triton.jit
def expert_rows(ends, expert):
    """Rows [begin, end) of an expert, where `ends` has the end of each expert's."""
    begin = tl.load(ends + tl.maximum(expert - 1, 0))
    return tl.where(expert == 0, 0, begin), tl.load(ends + expert)


@triton.jit
def store_product(
    total,  # float32 [BLOCK_N, BLOCK_M] of this split
    output,  # [rows, N]
    m,
    n,
    rows,
    N,
    sums,
    arrivals,
    block,
    split,
    splits,
    SPLIT: tl.constexpr,
):
    BLOCK_N: tl.constexpr = total.shape[0]
    BLOCK_M: tl.constexpr = total.shape[1]
    at = output + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    if SPLIT:
        part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = sums + (block * splits).to(tl.int64) * (BLOCK_N * BLOCK_M) + part
        tl.store(parts + split * (BLOCK_N * BLOCK_M), total)
        tl.debug_barrier()  # every thread's part is written before one of them counts the program in
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                total += tl.load(parts + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(at, tl.trans(total).to(output.dtype.element_ty), mask=inside)
            tl.store(arrivals + block, 0)
    else:
        tl.store(at, tl.trans(total).to(output.dtype.element_ty), mask=inside)
