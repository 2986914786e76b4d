"""`integer_rows_sm90.cu` on the CPU: its source, built by a C++ compiler, over `emulated_sm90.h`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from emulated_kernel import built
from torch import Tensor

from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import IntegerKernel
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles

_ENTRY = """
static TensorMap weights, scales;
#if ZEROS
static TensorMap zeros;
#endif
static Output* output;
static unsigned short *x_now, *x_then;
static int rows, inputs, outputs, second, tiles, parts, stages;
static long long x_bytes;
static const float* row_scales;

static void ahead() { memcpy(x_now, x_then, x_bytes); }
static void body() {
#if ROW_SCALES
  integer_rows(weights, scales, x_now, output, rows, inputs, inputs, outputs, second, tiles, parts, stages, row_scales);
#elif ZEROS
  integer_rows(weights, scales, x_now, output, rows, inputs, inputs, outputs, second, tiles, parts, stages, zeros);
#else
  integer_rows(weights, scales, x_now, output, rows, inputs, inputs, outputs, second, tiles, parts, stages);
#endif
}

// x at `now` becomes that at `then` when the kernel ahead has ended.
extern "C" int run(unsigned char* words, unsigned char* of_scales, int matrix_rows, int blocks, unsigned short* now,
                   unsigned short* then, int columns, Output* o, int r, int n, int s, int t, int p, int of_stages,
                   int grid, int threads, const float* of_rows, unsigned char* of_zeros) {
  weights.base = words, weights.row_bytes = INT8 ? 128ll * blocks : 128;
  weights.block_bytes = INT8 ? 128 : 128ll * matrix_rows;
  scales.base = of_scales, scales.row_bytes = (NVFP4 ? 1ll : 2ll) * matrix_rows;
  scales.block_bytes = SCALES * scales.row_bytes;
  weights.matrix_rows = matrix_rows, scales.matrix_rows = scales.box_rows = SCALES, row_scales = of_rows;
  scales.columns = NVFP4 ? matrix_rows / 2 : matrix_rows, scales.box_columns = NVFP4 ? OUTPUTS / 4 : OUTPUTS / 2;
  weights.box_rows = OUTPUTS / 2, weights.box_blocks = scales.box_blocks = GROUPS;
  weights.blocks = scales.blocks = blocks;
#if ZEROS
  zeros = scales, zeros.base = of_zeros, zeros.row_bytes = matrix_rows, zeros.block_bytes = ZERO_ROWS * matrix_rows;
  zeros.matrix_rows = zeros.box_rows = ZERO_ROWS, zeros.columns = matrix_rows / 2, zeros.box_columns = OUTPUTS / 4;
#endif
  output = o, rows = r, inputs = columns, outputs = n, second = s, tiles = t, parts = p, stages = of_stages;
  x_now = now, x_then = then, x_bytes = 2ll * r * columns;
  std::vector<unsigned short> before(now, now + r * columns);
  for (int block = 0; block < grid; block++) {
    memcpy(now, before.data(), x_bytes);
    if (int left = run_cluster(1, threads, SHARED_BYTES, {block, 0}, {grid, 1}, ahead, body, 31)) return left;
  }
  return 0;
}
"""


def library_of(kernel: IntegerKernel, folder: Path) -> ctypes.CDLL:
    return built(kernel.source, _ENTRY, folder)


def product(
    library: ctypes.CDLL, kernel: IntegerKernel, x: Tensor, matrix: Int4Tiles | Nvfp4Tiles | Int8Pairs, *, grid: int
) -> Tensor:
    """`integer_rows` in so many thread blocks, each of which starts before the kernel ahead has stored x."""
    int8, matrix_rows = isinstance(matrix, Int8Pairs), matrix.rows
    elements = matrix.elements if isinstance(matrix, Int8Pairs) else matrix.words
    row_scales = (
        matrix.scales if int8 and not kernel.scales else matrix.row_scales if isinstance(matrix, Nvfp4Tiles) else None
    )
    zeros = matrix.zero_points if isinstance(matrix, Int4Tiles) else None
    blocks = elements.shape[-1] // 128 if int8 else len(elements)
    outputs, second = (matrix_rows // 2,) * 2 if kernel.gated else (matrix_rows, kernel.tile // 2)
    shape = (len(x), outputs) if kernel.parts == 1 else (kernel.parts, len(x), outputs)
    output = torch.full(shape, torch.nan, dtype=x.dtype if kernel.parts == 1 else torch.float32)
    now, number, pointer = torch.full_like(x, torch.nan), ctypes.c_int, ctypes.c_void_p
    tiles, stages = -(-matrix_rows // kernel.tile), kernel.tiles // kernel.blocks
    left = library.run(
        pointer(elements.data_ptr()), pointer(matrix.scales.data_ptr()), number(matrix_rows), number(blocks),
        pointer(now.data_ptr()), pointer(x.data_ptr()), number(x.shape[1]), pointer(output.data_ptr()),
        *map(number, (len(x), outputs, second, tiles, kernel.parts, stages, grid, kernel.consumers + 32)),
        pointer(None if row_scales is None else row_scales.data_ptr()),
        pointer(None if zeros is None else zeros.data_ptr()),
    )  # fmt: skip
    assert left == 0, f"{left} threads wait for what never comes"
    return output
