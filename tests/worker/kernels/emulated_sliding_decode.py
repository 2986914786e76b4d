"""`sliding_decode_sm90.cu` on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h` in place of PTX."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from attention_cases import layout
from emulated_kernel import around_the_kernel_ahead, built
from paged_case import PagedCase
from torch import Tensor

from modelserve_worker.kernels.attention.hopper.sliding_decode_sm90 import DECODE_PARTS as PARTS
from modelserve_worker.kernels.attention.hopper.sliding_decode_sm90 import THREADS, DecodeKernel
from modelserve_worker.kernels.step import Segments

_ENTRY = """
static TensorMap k, v;
static const unsigned short* q;
static unsigned short* output;
static const int *slots, *positions, *table;
static long long page_bytes, table_stride;
static int group, settled;
static unsigned char *memory_now, *memory_then;
static long long memory_bytes;

static void ahead() { memcpy(memory_now, memory_then, memory_bytes); }
static void body() {
  sliding_decode(k, v, k.base, v.base, page_bytes, q, output, slots, positions, table, table_stride, group, settled);
}

// `bytes` at `now`, where all pages and queries are, become those at `then` when the kernel ahead has ended.
extern "C" int run(unsigned char* now, unsigned char* then, long long bytes, long long k_at, long long v_at,
                   long long q_at, long long stride, unsigned short* o, const int* s, const int* p, const int* t,
                   long long of_table, int kv_heads, int g, int is_settled, int rows, int shared_bytes) {
  k = {now + k_at, stride}, v = {now + v_at, stride}, q = (const unsigned short*)(now + q_at), output = o;
  slots = s, positions = p, table = t, page_bytes = stride, table_stride = of_table;
  group = g, settled = is_settled;
  memory_then = then, memory_bytes = bytes;
  for (int row = 0; row < rows; row++)
    for (int head = 0; head < kv_heads; head++) {
      std::vector<unsigned char> before(now, now + bytes);
      memory_now = now;
      const Dim number = {head * PARTS, row}, grid = {kv_heads * PARTS, rows};
      const int left = run_cluster(PARTS, THREADS, shared_bytes, number, grid, ahead, body);
      if (left) return left;
      memcpy(now, before.data(), bytes);
    }
  return 0;
}
"""


def library_of(kernel: DecodeKernel, folder: Path) -> ctypes.CDLL:
    return built(kernel.source, _ENTRY, folder)


def attended(library: ctypes.CDLL, kernel: DecodeKernel, case: PagedCase, q: Tensor, decode: Segments) -> Tensor:
    """Output of a launch that starts before the kernel ahead has stored queries and the rows' own keys and values."""
    rows, output = layout(case), torch.full_like(q, torch.nan)
    now, then = around_the_kernel_ahead(case, q, decode)
    wide, number = ctypes.c_longlong, ctypes.c_int
    left = library.run(
        *(ctypes.c_void_p(each.data_ptr()) for each in (now, then)), wide(now.numel()),
        *(wide(rows.origin + rows.offsets[plane]) for plane in ("k", "v")), wide(case.arena.numel()),
        wide(rows.page_stride),
        *(ctypes.c_void_p(each.data_ptr()) for each in (output, decode.slots, decode.positions, case.table)),
        wide(case.table.stride(0)),
        *map(number, (rows.heads, q.shape[1] // rows.heads, decode.settled, len(q))),
        number(kernel.shared_bytes),
    )  # fmt: skip
    assert left == 0, f"{left} of {THREADS * PARTS} threads wait for what never comes"
    return output
