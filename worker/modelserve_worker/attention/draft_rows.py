"""A drafter's own rows in the target's pages, in plain PyTorch: correct on any device, the kernels' reference.

Layers that see all of the context have rows in the global pages of the request, beside the target's. Those with a
window have a ring of further global pages, behind the others in the same block table (`sizing.pages`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import DraftLayers
from modelserve_worker.kernels.attention.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.block_tables import BlockTables

_KEYS_PER_PASS = 4096  # rows of the context that are gathered at a time


class DraftLayerPages:
    """Where the rows of one layer lie: views [pages, H, page tokens, D] of K and V by view row, and how a position's
    entry of the global block table follows: (first + p // page_tokens % entries), of a layer without a window
    p // page_tokens."""

    def __init__(self, cache: KVCache, *, window: bool, number: int) -> None:
        """`number` among the layers with a window, or among those without."""
        draft = cache.geometry.draft
        assert draft is not None, "the pool was made without a drafter"
        self.planes = cache.window_draft_planes(number) if window else cache.full_draft_planes(number)
        self.page_tokens = draft.page_tokens if window else cache.geometry.global_page.page_tokens
        self.first, self.entries = (draft.first_ring_entry, draft.ring_entries) if window else (0, 0)
        self.last_page = cache.num_pages[LayerKind.GLOBAL] - 1  # page n is view row last_page - n

    def entry(self, positions: Tensor) -> Tensor:
        """Entries of the block table, of positions of any shape."""
        pages = positions // self.page_tokens
        return self.first + pages % self.entries if self.entries else pages


def draft_layer_pages(layers: DraftLayers, cache: KVCache) -> tuple[DraftLayerPages, ...]:
    """Of each layer."""
    counts = {True: 0, False: 0}
    found = []
    for window in (window is not None for window in layers.windows):
        found.append(DraftLayerPages(cache, window=window, number=counts[window]))
        counts[window] += 1
    return tuple(found)


class PlainDraftRows:
    """A DraftRows; asks the device where its rows are, and attends block by block."""

    def __init__(self, layers: DraftLayers, cache: KVCache, tables: BlockTables) -> None:
        self._layers = layers
        self._pages = draft_layer_pages(layers, cache)
        self._table = tables.device[LayerKind.GLOBAL]
        self._blocks: list[tuple[int, int]] = []  # slot and anchor of each

    def store(self, step: Step, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        for pages, (keys, values) in zip(self._pages, rows, strict=True):
            slots = step.ring_slots if pages.entries else step.global_slots
            assert slots is not None
            kept = (slots >= 0).nonzero()[:, 0]
            positions = step.positions[kept].long()
            view_rows = pages.last_page - self._table[slots[kept].long(), pages.entry(positions)].long()
            for name, plane in (("k", keys), ("v", values)):
                pages.planes[name][view_rows, :, positions % pages.page_tokens] = plane[kept]

    def begin(self, slots: Tensor, anchors: Tensor) -> None:
        self._blocks = list(zip(slots.tolist(), anchors.tolist(), strict=True))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = [
            self._block(layer, *each, *of) for each, of in zip(zip(q, k, v, strict=True), self._blocks, strict=True)
        ]
        return torch.stack(found)

    def _block(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slot: int, anchor: int) -> Tensor:
        """q [B, Hq, D], k and v [B, H, D] of one block -> [B, Hq * D]."""
        rows, window = len(q), self._layers.windows[layer]
        softmax = SoftmaxAccumulator((q * self._layers.scale)[None], kv_heads=k.shape[1])
        first = anchor if slot < 0 else 0 if window is None else max(0, anchor - window)
        for begin in range(first, anchor, _KEYS_PER_PASS):
            positions = torch.arange(begin, min(anchor, begin + _KEYS_PER_PASS), device=q.device)
            keys, values = (self._stored(layer, name, slot, positions).to(q.dtype)[None] for name in ("k", "v"))
            softmax.add(keys, values, torch.ones(1, rows, len(positions), dtype=torch.bool, device=q.device))
        seen = torch.ones(rows, rows, dtype=torch.bool, device=q.device)
        if self._layers.causal[layer]:
            seen = seen.tril()
        softmax.add(k.transpose(0, 1)[None], v.transpose(0, 1)[None], seen[None])
        return softmax.result(q.dtype)[0].flatten(1)

    def _stored(self, layer: int, name: str, slot: int, positions: Tensor) -> Tensor:
        """[H, positions, D]."""
        pages = self._pages[layer]
        view_rows = pages.last_page - self._table[slot, pages.entry(positions)].long()
        return pages.planes[name][view_rows, :, positions % pages.page_tokens].transpose(0, 1)
