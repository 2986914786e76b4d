"""`linear_rows_sm90.cu` with experts on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from emulated_kernel import built
from torch import Tensor

from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import RowsKernel

_ENTRY = """
static TensorMap weights, inputs;
static unsigned short *output, *x_now, *x_then;
static const int* choices;
static int rows, outputs, second, tiles, stages, top_k, experts;
static long long x_bytes;

static void ahead() { memcpy(x_now, x_then, x_bytes); }
static void body() {
  chosen_rows(weights, inputs, weights, nullptr, output, rows, outputs, second, tiles, 1, stages, choices, top_k,
              experts);
}

// x at `now` becomes that at `then` when the kernel ahead has ended.
extern "C" int run(unsigned char* matrices, int all_rows, int columns, unsigned short* now, unsigned short* then,
                   int x_rows, unsigned short* o, const int* c, int r, int n, int s, int t, int of_stages, int k, int e,
                   int depth, int grid, int threads, int shared_bytes) {
  weights.base = matrices, weights.matrix_rows = all_rows, weights.box_rows = OUTPUTS / 2;
  inputs.base = (unsigned char*)now, inputs.matrix_rows = x_rows, inputs.box_rows = ROWS;
  weights.row_bytes = inputs.row_bytes = columns * 2, weights.blocks = inputs.blocks = columns / 64;
  weights.box_blocks = inputs.box_blocks = depth;
  output = o, choices = c, rows = r, outputs = n, second = s, tiles = t, stages = of_stages, top_k = k, experts = e;
  x_now = now, x_then = then, x_bytes = (long long)x_rows * columns * 2;
  std::vector<unsigned short> before(now, now + x_rows * columns);
  for (int block = 0; block < grid; block++) {
    memcpy(now, before.data(), x_bytes);
    if (int left = run_cluster(1, threads, shared_bytes, {block, 0}, {grid, 1}, ahead, body, 31)) return left;
  }
  return 0;
}
"""


def library_of(kernel: RowsKernel, folder: Path) -> ctypes.CDLL:
    return built(kernel.source, _ENTRY, folder)


def products(
    library: ctypes.CDLL, kernel: RowsKernel, x: Tensor, experts: Tensor, matrices: Tensor, *, blocks: int
) -> Tensor:
    """`chosen_rows_sm90` of x bfloat16 [T, K], or [T k, T, K] behind gates, in so many thread blocks, each of which
    starts before the kernel ahead has stored x."""
    (rows, top_k), (count, matrix_rows, inputs) = experts.shape, matrices.shape
    slots, outputs = rows * top_k, matrix_rows // 2 if kernel.gated else matrix_rows
    output = x.new_full((slots, rows, outputs) if kernel.gated else (slots, outputs), torch.nan)
    now, then = torch.full_like(x, torch.nan), x.clone()
    second, number = outputs if kernel.gated else kernel.tile // 2, ctypes.c_int
    tiles, stages = -(-matrix_rows // kernel.tile), -(-inputs // (64 * kernel.blocks))
    pointer = ctypes.c_void_p
    left = library.run(
        pointer(matrices.data_ptr()), number(count * matrix_rows), number(inputs), pointer(now.data_ptr()),
        pointer(then.data_ptr()), number(x.numel() // inputs), pointer(output.data_ptr()), pointer(experts.data_ptr()),
        *map(number, (rows, outputs, second, tiles, stages, top_k, count, kernel.blocks, blocks)),
        number(kernel.consumers + 32), number(kernel.shared_bytes),
    )  # fmt: skip
    assert left == 0, f"{left} threads wait for what never comes"
    return output
