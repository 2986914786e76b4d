"""`cluster_rows_sm90.cu` on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from emulated_kernel import built
from torch import Tensor

from modelserve_worker.kernels.products.hopper.cluster_rows_sm90 import ClusterKernel

_ENTRY = """
static TensorMap weights, inputs;
static unsigned short *output, *x_now, *x_then;
static int rows, outputs, blocks_of_inputs;
static long long x_bytes;

static void ahead() { memcpy(x_now, x_then, x_bytes); }
static void body() { cluster_rows(weights, inputs, output, rows, outputs, blocks_of_inputs); }

// x at `now` becomes that at `then` when the kernel ahead has ended.
extern "C" int run(unsigned char* matrix, int matrix_rows, int columns, unsigned short* now, unsigned short* then,
                   int r, int box, unsigned short* o, int n, int tiles, int shared_bytes) {
  weights.base = matrix, weights.matrix_rows = matrix_rows, weights.box_rows = TILE;
  inputs.base = (unsigned char*)now, inputs.matrix_rows = r, inputs.box_rows = box;
  weights.row_bytes = inputs.row_bytes = columns * 2, weights.blocks = inputs.blocks = columns / 64;
  weights.box_blocks = inputs.box_blocks = 1;
  output = o, rows = r, outputs = n, blocks_of_inputs = columns / 64;
  x_now = now, x_then = then, x_bytes = (long long)r * columns * 2;
  std::vector<unsigned short> before(now, now + r * columns);
  const int grid = tiles * PARTS;
  for (int block = 0; block < grid; block += PARTS) {
    memcpy(now, before.data(), x_bytes);
    if (int left = run_cluster(PARTS, CONSUMERS + 32, shared_bytes, {block, 0}, {grid, 1}, ahead, body, 31 * PARTS))
      return left;
  }
  return 0;
}
"""


def product(kernel: ClusterKernel, x: Tensor, weight: Tensor, folder: Path) -> Tensor:
    """`cluster_rows_sm90` of x bfloat16 [T, K] in clusters that start before the kernel ahead has stored x."""
    (rows, inputs), matrix_rows = x.shape, weight.shape[0]
    outputs = matrix_rows // 2 if kernel.gated else matrix_rows
    output, now, then = x.new_full((rows, outputs), torch.nan), torch.full_like(x, torch.nan), x.clone()
    tiles, box = -(-matrix_rows // kernel.tile), -(-rows // 8) * 8
    pointer, number = ctypes.c_void_p, ctypes.c_int
    left = built(kernel.source, _ENTRY, folder).run(
        pointer(weight.data_ptr()), number(matrix_rows), number(inputs), pointer(now.data_ptr()),
        pointer(then.data_ptr()), number(rows), number(box), pointer(output.data_ptr()), number(outputs),
        number(tiles), number(kernel.shared_bytes),
    )  # fmt: skip
    assert left == 0, f"{left} threads wait for what never comes"
    return output
