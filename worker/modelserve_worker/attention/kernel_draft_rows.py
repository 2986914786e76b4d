"""A drafter's own rows in the target's pages, on GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.attention.draft_rows import draft_layer_pages
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import DraftLayers
from modelserve_worker.kernels.attention.arguments import Blocks, DraftPages
from modelserve_worker.kernels.attention.triton import draft_blocks_triton as kernels
from modelserve_worker.kernels.compiling.bundles import constant
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.block_tables import BlockTables

PROGRAMS = 256  # from which on no block's keys are cut into parts: twice the multiprocessors of a large GPU
MOST_PARTS = 16  # a power of two
_KEYS = 64  # of a tile
_ROW_ELEMENTS = 128 * 128  # of the query rows of a program: so many have their sums in registers


class KernelDraftRows:
    """A DraftRows. Blocks of few requests are cut into parts of their keys, so that all of a GPU reads them."""

    def __init__(self, layers: DraftLayers, cache: KVCache, tables: BlockTables) -> None:
        self._layers = layers
        table = tables.device[LayerKind.GLOBAL]
        self._pages = []
        for pages in draft_layer_pages(layers, cache):
            k, v = (pages.planes[name] for name in ("k", "v"))
            _, heads, tokens, width = k.shape
            constants = (heads, width, tokens, pages.first, pages.entries)
            self._pages.append(
                DraftPages(
                    table,
                    table.stride(0),
                    k[pages.last_page],
                    v[pages.last_page],
                    -k.stride(0),
                    *map(constant, constants),
                )
            )
        self._slots = self._anchors = torch.zeros(0, dtype=torch.int32, device=table.device)

    def store(self, step: Step, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        for pages, window, (k, v) in zip(self._pages, self._layers.windows, rows, strict=True):
            slots = step.global_slots if window is None else step.ring_slots
            assert slots is not None
            columns = triton.next_power_of_2(k.shape[1] * k.shape[2])
            launch(
                kernels.store_draft_rows, (len(k),), k, k.stride(0), v, v.stride(0), step.positions, slots, pages,
                COLUMNS=columns, num_warps=max(1, min(8, columns // 256)),
            )  # fmt: skip

    def begin(self, slots: Tensor, anchors: Tensor) -> None:
        self._slots, self._anchors = slots, anchors

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        segments, block, heads, width = q.shape
        group, pages = heads // k.shape[2], self._pages[layer]
        rows = min(triton.next_power_of_2(block * group), _ROW_ELEMENTS // width)
        grid = (segments, k.shape[2] * -(-block * group // rows))
        parts = min(MOST_PARTS, 1 << max(0, (PROGRAMS // math.prod(grid)).bit_length() - 1))
        output = torch.empty_like(q)
        results = output, output, output  # the last two of one part are not written
        if parts > 1:
            shape = (*q.shape[:3], parts)
            numerators = q.new_empty((*shape, width), dtype=torch.float32)
            maxima, sums = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
            results = numerators, maxima, sums
        blocks = Blocks(q, k, k.stride(1), v, v.stride(1), constant(block), constant(group))
        launch(
            kernels.attend_blocks, (*grid, parts), blocks, self._slots, self._anchors, pages, *results,
            self._layers.scale * math.log2(math.e), WINDOW=self._layers.windows[layer] or 0,
            CAUSAL=self._layers.causal[layer], PARTS=parts, ROWS=max(16, rows), KEYS=_KEYS,
            BLOCK_KEYS=max(16, triton.next_power_of_2(block)), num_warps=8 if rows * width > 8192 else 4, num_stages=2,
        )  # fmt: skip
        if parts > 1:
            launch(
                kernels.combine_parts, (segments * block * heads,), *results, output, PARTS=parts, D=width,
                num_warps=1 if width <= 128 else 4,
            )  # fmt: skip
        return output.flatten(2)
