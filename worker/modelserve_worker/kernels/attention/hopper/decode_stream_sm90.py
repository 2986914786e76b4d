"""Decode attention of many rows on Hopper over pages of K and V: the launch of `decode_stream_sm90.cu`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve.sizing.backends.attention import STREAM_STAGES, STREAM_WARPS, decode_stream_bytes
from modelserve_worker.kernels.attention.arguments import LayerPages, Splits
from modelserve_worker.kernels.attention.paged_layout import LayerRows, rising_pages
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, launch, pointer, tensor_map
from modelserve_worker.kernels.step import Segments

BESIDE_BLOCKS = 1024  # of a launch beside another kernel, that begin as thread blocks of that end
_PART, _OCTET = 64, 8  # columns of a box, and its keys


@dataclass(frozen=True, slots=True)
class StreamKernel:
    """One compilation, for layers of this width and window."""

    width: int
    window: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: LayerRows) -> StreamKernel:
        return cls(rows.width, rows.window, STREAM_WARPS[rows.width], STREAM_STAGES)

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def source(self) -> CudaSource:
        names = ("width", "window", "warps", "stages")
        defines = tuple(f"{name.upper()}={getattr(self, name)}" for name in names)
        shared = decode_stream_bytes(self.width, self.warps, self.stages)
        return CudaSource("decode_stream_sm90.cu", "decode_stream", "sm_90a", defines, shared)


def decode_stream(
    q: Tensor,
    output: Tensor,
    decode: Segments,
    *,
    pages: LayerPages,
    splits: Splits | None = None,
    split_pages: int = 1,
    beside: bool,
) -> None:
    """Rows [0, B) of q [T, Hq, D] bfloat16 over pages -> the same rows of `output` where they are not split; float32
    outputs, maxima and sums of the others' splits, as `combine` reads them. `beside`: see `decode_attention`.
    """
    rows, arena, table = pages.rows, pages.arena, pages.table
    parts, most_splits = ((None,) * 3, 1) if splits is None else (splits[:3], splits.MOST.value)
    count, group, kernel = decode.slots.numel(), q.shape[1] // rows.heads, StreamKernel.of(rows)
    assert q.dtype == torch.bfloat16
    assert (splits is None) == bool(rows.window)
    rising = rising_pages(rows.origin, rows.page_stride, size=arena.numel())
    shape = (_PART, rows.heads * rows.page_tokens, rows.width // _PART, rising.pages)
    strides, box = (2 * rows.width, 2 * _PART, rising.stride), (_PART, _OCTET, rows.width // _PART, 1)
    first = arena.data_ptr() + rising.first
    maps = [tensor_map(first + rows.offsets[plane], shape, strides, box, promoted=False) for plane in ("k", "v")]
    blocks = min(count * rows.heads * most_splits, BESIDE_BLOCKS)
    numbers = (
        rising.origin, rising.step, count, rows.heads, group, most_splits, split_pages, int(decode.settled), int(beside)
    )  # fmt: skip
    launch(
        kernel.source, grid=(blocks, 1), threads=kernel.threads, resident=int(not beside),
        arguments=(
            *((each, None) for each in maps), pointer(q), pointer(output), *map(pointer, parts),
            *map(pointer, (decode.slots, decode.positions, table)), (table.stride(0), ctypes.c_longlong),
            *((number, ctypes.c_int) for number in numbers),
        ),
    )  # fmt: skip
