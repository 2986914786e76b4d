"""`decode_stream_sm90.cu` on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h` in place of PTX."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from attention_cases import layout
from emulated_kernel import around_the_kernel_ahead, built, merged_splits
from paged_case import PagedCase
from torch import Tensor

from modelserve_worker.kernels.attention.hopper.decode_stream_sm90 import StreamKernel
from modelserve_worker.kernels.attention.paged_layout import rising_pages
from modelserve_worker.kernels.step import Segments

_ENTRY = """
static TensorMap k, v;
static const unsigned short* q;
static unsigned short* output;
static const int *slots, *positions, *table;
static long long table_stride;
static int rows, kv_heads, group, settled;
static float *partial, *maxima, *totals;
static int origin, step, most_splits, split_pages;
static unsigned char *memory_now, *memory_then;
static long long memory_bytes;

static void ahead() { memcpy(memory_now, memory_then, memory_bytes); }
static void body() {
  decode_stream(k, v, q, output, partial, maxima, totals, slots, positions, table, table_stride, origin, step, rows,
                kv_heads, group, most_splits, split_pages, settled, 0);
}

// `bytes` at `now`, where all pages and queries are, become those at `then` when the kernel ahead has ended.
extern "C" int run(unsigned char* now, unsigned char* then, long long bytes, long long k_at, long long v_at,
                   long long q_at, long long stride, unsigned short* o, const int* s, const int* p, const int* t,
                   long long of_table, float* a, float* m, float* sums, int first, int by, int most, int least,
                   int heads, int g, int is_settled, int count, int blocks, int shared_bytes) {
  k = {now + k_at, stride, WIDTH / 64}, v = {now + v_at, stride, WIDTH / 64};
  partial = a, maxima = m, totals = sums, origin = first, step = by, most_splits = most, split_pages = least;
  q = (const unsigned short*)(now + q_at), output = o;
  slots = s, positions = p, table = t, table_stride = of_table;
  rows = count, kv_heads = heads, group = g, settled = is_settled;
  memory_now = now, memory_then = then, memory_bytes = bytes;
  const std::vector<unsigned char> before(now, now + bytes);
  for (int block = 0; block < blocks; block++) {
    const int left = run_cluster(1, (WARPS + 1) * 32, shared_bytes, {block, 0}, {blocks, 1}, ahead, body);
    if (left) return left;
    memcpy(now, before.data(), bytes);
  }
  return 0;
}
"""


def library_of(kernel: StreamKernel, folder: Path) -> ctypes.CDLL:
    return built(kernel.source, _ENTRY, folder)


def attended(
    library: ctypes.CDLL,
    kernel: StreamKernel,
    case: PagedCase,
    q: Tensor,
    decode: Segments,
    *,
    blocks: int,
    most_splits: int = 1,
    split_pages: int = 1,
) -> Tensor:
    """Output of a launch that starts before the kernel ahead has stored queries and the rows' own keys and values;
    splits are merged by torch."""
    rows, output = layout(case), torch.full_like(q, torch.nan)
    now, then = around_the_kernel_ahead(case, q, decode)
    wide, number = ctypes.c_longlong, ctypes.c_int
    rising = rising_pages(rows.origin, rows.page_stride, size=case.arena.numel())
    count, width, group = len(q), q.shape[2], q.shape[1] // rows.heads
    shape = (count, most_splits, rows.heads, group)
    partial, maxima, totals = (torch.full(size, torch.nan) for size in ((*shape, width), shape, shape))
    left = library.run(
        *(ctypes.c_void_p(each.data_ptr()) for each in (now, then)), wide(now.numel()),
        *(wide(rising.first + rows.offsets[plane]) for plane in ("k", "v")), wide(case.arena.numel()),
        wide(rising.stride),
        *(ctypes.c_void_p(each.data_ptr()) for each in (output, decode.slots, decode.positions, case.table)),
        wide(case.table.stride(0)), *(ctypes.c_void_p(each.data_ptr()) for each in (partial, maxima, totals)),
        *map(number, (rising.origin, rising.step, most_splits, split_pages)),
        *map(number, (rows.heads, group, decode.settled, count, blocks, kernel.source.shared_bytes)),
    )  # fmt: skip
    assert left == 0, f"{left} of {kernel.threads} threads wait for what never comes"
    if not kernel.window:
        for row, merged in merged_splits(partial, maxima, totals):
            output[row] = merged.to(q.dtype)
    return output
