"""Decode attention of sliding layers on Hopper, for few rows: the launch of `sliding_decode_sm90.cu`, over pages.

One launch, where `decode_attention_triton` has two. Of many rows that one keeps memory as busy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve_worker.kernels.cuda_kernel import CudaSource, launch, pointer
from modelserve_worker.kernels.paged_layout import LayerRows
from modelserve_worker.kernels.sliding_attention_sm90 import PAGE, WIDTH, page_maps
from modelserve_worker.kernels.step import Segments

PARTS = 8  # thread blocks that share a row's keys of one head
MOST_BLOCKS = 256  # in each place of the multiprocessors, so two turns: 2 rows of 31B, 32 of E4B
MOST_QUERIES = 8  # of a KV head: columns of a product
THREADS = 256
_MOST_KEYS = 128  # of a share: a tile of 16 for each warp
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of shared memory, and of it for each block


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """One compilation, for layers with this window."""

    window: int

    @property
    def keys(self) -> int:
        """Of a share at most: whole tiles of 16."""
        return -(-self.window // (16 * PARTS)) * 16

    @property
    def shared_bytes(self) -> int:
        """K and V of a share's octets; queries and weights; maxima, sums and outputs of tiles and shares; barriers."""
        rows = 2 * (self.keys + 8) * 2 * WIDTH
        operands = MOST_QUERIES * (2 * WIDTH + 16 + 2 * self.keys + 16)
        floats = MOST_QUERIES * (2 * THREADS // 32 + 2 * PARTS + WIDTH)
        return rows + operands + 4 * floats + 3 * 8

    @property
    def most_blocks(self) -> int:
        """Of a launch, behind which Triton's kernel keeps memory as busy: MOST_BLOCKS for each that share a
        multiprocessor."""
        return MOST_BLOCKS * (_MULTIPROCESSOR_BYTES // (self.shared_bytes + _RESERVED_BYTES))

    @property
    def source(self) -> CudaSource:
        defines = (f"WINDOW={self.window}",)
        return CudaSource("sliding_decode_sm90.cu", "sliding_decode", "sm_90a", defines, self.shared_bytes)


def takes(rows: LayerRows, *, count: int, query_heads: int) -> bool:
    """Whether the kernel attends for `count` rows over a sliding layer of bfloat16 rows, 256 wide."""
    kernel = DecodeKernel(rows.window)
    fits = query_heads // rows.heads <= MOST_QUERIES and kernel.keys <= _MOST_KEYS
    return fits and 0 < count * rows.heads * PARTS <= kernel.most_blocks


def sliding_decode(
    q: Tensor, output: Tensor, decode: Segments, *, rows: LayerRows, table: Tensor, arena: Tensor
) -> None:
    """Rows [0, B) of q [T, Hq, 256] bfloat16 over the pages of `arena` -> the same rows of `output`."""
    count, group, kernel = decode.slots.numel(), q.shape[1] // rows.heads, DecodeKernel(rows.window)
    assert q.dtype == torch.bfloat16
    assert rows.entries == -(-(rows.window - 1) // PAGE) + 1, "the kernel goes round tables of this length"
    first = arena.data_ptr() + rows.origin
    planes = ((first + rows.offsets[plane], ctypes.c_void_p) for plane in ("k", "v"))
    described = (decode.slots, decode.positions, table)
    launch(
        kernel.source, grid=(rows.heads * PARTS, count), threads=THREADS,
        arguments=(
            # Each row is read once.
            *((each, None) for each in page_maps(arena, rows, promoted=False)), *planes,
            (rows.page_stride, ctypes.c_longlong), pointer(q), pointer(output), *map(pointer, described),
            (table.stride(0), ctypes.c_longlong),
            *((number, ctypes.c_int) for number in (group, int(decode.settled))),
        ),
    )  # fmt: skip
