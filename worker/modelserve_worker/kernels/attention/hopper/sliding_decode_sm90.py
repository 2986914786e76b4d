"""Decode attention of sliding layers on Hopper, for few rows: the launch of `sliding_decode_sm90.cu`, over pages.

One launch, where `decode_attention_triton` has two. Of many rows `decode_stream_sm90` keeps memory as busy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.backends.attention import DECODE_PARTS, sliding_decode_bytes
from modelserve_worker.kernels.attention.arguments import LayerPages
from modelserve_worker.kernels.attention.hopper.sliding_chunk_sm90 import PAGE, page_maps
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer
from modelserve_worker.kernels.step import Segments

THREADS = 256


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """One compilation, for layers with this window."""

    window: int

    @property
    def shared_bytes(self) -> int:
        return sliding_decode_bytes(self.window)

    @property
    def source(self) -> CudaSource:
        defines = (f"WINDOW={self.window}",)
        return CudaSource("sliding_decode_sm90.cu", "sliding_decode", "sm_90a", defines, self.shared_bytes)


def sliding_decode(q: Tensor, output: Tensor, decode: Segments, *, pages: LayerPages) -> None:
    """Rows [0, B) of q [T, Hq, 256] bfloat16 over pages -> the same rows of `output`."""
    rows, arena, table = pages.rows, pages.arena, pages.table
    count, group, kernel = decode.slots.numel(), q.shape[1] // rows.heads, DecodeKernel(rows.window)
    assert q.dtype == torch.bfloat16
    assert rows.entries == -(-(rows.window - 1) // PAGE) + 1, "the kernel goes round tables of this length"
    first = arena.data_ptr() + rows.origin
    planes = ((first + rows.offsets[plane], ctypes.c_void_p) for plane in ("k", "v"))
    described = (decode.slots, decode.positions, table)
    launch(
        kernel.source, grid=(rows.heads * DECODE_PARTS, count), threads=THREADS,
        arguments=(
            # Each row is read once.
            *((each, None) for each in page_maps(pages, promoted=False)), *planes,
            (rows.page_stride, ctypes.c_longlong), pointer(q), pointer(output), *map(pointer, described),
            (table.stride(0), ctypes.c_longlong),
            *((number, ctypes.c_int) for number in (group, int(decode.settled))),
        ),
    )  # fmt: skip
