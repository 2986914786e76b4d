"""`v_only_decode_sm90.cu` on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h` in place of PTX."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from attention_cases import layout
from emulated_kernel import built, merged_splits
from paged_case import PagedCase
from torch import Tensor

from modelserve_worker.kernels.attention.arguments import Turns
from modelserve_worker.kernels.attention.hopper.v_only_decode_sm90 import SOURCE, THREADS
from modelserve_worker.kernels.attention.paged_layout import rising_pages
from modelserve_worker.kernels.attention.row_codec import v_only_columns
from modelserve_worker.kernels.step import Segments

_ENTRY = """
static TensorMap values;
static const unsigned short *q, *weight;
static unsigned short* output;
static float *partial, *maxima, *totals;
static const int *slots, *positions, *table;
static const float* turns[4];
static long long table_stride;
static int origin, rows, heads, group, most_splits, split_pages, beside;

static void ahead() {}
static void body() {
  global_decode(values, q, output, partial, maxima, totals, slots, positions, table, table_stride, origin, -1, weight,
                turns[0], turns[1], turns[2], turns[3], rows, heads, group, most_splits, split_pages, 0, beside);
}

extern "C" int run(const unsigned char* lowest, long long page_bytes, int last_page, const unsigned short* queries,
                   unsigned short* out, float* p, float* m, float* t, const int* s, const int* at, const int* pages,
                   long long stride,
                   const unsigned short* w, const float* a, const float* b, const float* c, const float* d,
                   int kv_heads, int g, int most, int least, int is_beside, int count, int blocks, int shared_bytes,
                   int threads) {
  values = {lowest, page_bytes, 8, 32}, origin = last_page, q = queries, partial = p, maxima = m, totals = t, slots = s;
  positions = at, table = pages, table_stride = stride, weight = w, turns[0] = a, turns[1] = b, turns[2] = c;
  turns[3] = d, heads = kv_heads, group = g, most_splits = most, split_pages = least, beside = is_beside;
  rows = count, output = out;
  for (int block = 0; block < blocks; block++) {
    const int left = run_cluster(1, threads, shared_bytes, {block, 0}, {blocks, 1}, ahead, body);
    if (left) return left;
  }
  return 0;
}
"""


def library(folder: Path) -> ctypes.CDLL:
    return built(SOURCE, _ENTRY, folder)


def attended(
    library: ctypes.CDLL, case: PagedCase, q: Tensor, decode: Segments, *, key_weight: Tensor, turns: Turns,
    most_splits: int, split_pages: int, beside: bool, blocks: int = 3,
) -> Tensor:  # fmt: skip
    """Output in the order of the head, NaN for padding; splits are merged by torch."""
    rows, (count, heads, width) = layout(case), q.shape
    group = heads // rows.heads
    shape = (count, most_splits, rows.heads, group)
    partial, maxima, totals = (torch.full(size, torch.nan) for size in ((*shape, width), shape, shape))
    wide, number = ctypes.c_longlong, ctypes.c_int
    rising = rising_pages(rows.origin, rows.page_stride, size=case.arena.numel())
    assert rising.step == -1
    lowest = case.arena.data_ptr() + rising.first + rows.offsets["v"]
    output = torch.full_like(q, torch.nan)
    left = library.run(
        ctypes.c_void_p(lowest), wide(rising.stride), number(rising.origin),
        *(
            ctypes.c_void_p(each.data_ptr())
            for each in (q, output, partial, maxima, totals, decode.slots, decode.positions, case.table)
        ),
        wide(case.table.stride(0)), *(ctypes.c_void_p(each.data_ptr()) for each in (key_weight, *turns[:4])),
        *map(number, (rows.heads, group, most_splits, split_pages, beside, count, blocks)),
        *map(number, (SOURCE.shared_bytes, THREADS)),
    )  # fmt: skip
    assert left == 0, f"{left} of {THREADS} threads wait for what never comes"
    for row, merged in merged_splits(partial, maxima, totals):
        output[row][:, v_only_columns(width, pairs=case.pairs)] = merged.to(q.dtype)
    return output
