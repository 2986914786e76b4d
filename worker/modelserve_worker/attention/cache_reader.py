"""Reading a target's stored rows in plain PyTorch, for layers that have queries only: the kernels' reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.memory import KEYS_PER_PASS
from modelserve_worker.attention.page_groups import global_rows, sliding_rows
from modelserve_worker.attention.paged_attention import DeriveKeys
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.kv_stamps import ReadAudit
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.attention.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.attention.row_codec import v_only_columns
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import Attention
from modelserve_worker.step.block_tables import BlockTables


class PlainCacheReader:
    """A CacheReader; asks the device where its rows are, and attends row by row."""

    def __init__(
        self, kinds: Sequence[LayerKind], *, cache: KVCache, tables: BlockTables, architecture: ModelArchitecture,
        derive_keys: DeriveKeys,
    ) -> None:  # fmt: skip
        """`architecture`: the target's; `kinds`: of the layers that read."""
        self._kinds = tuple(kinds)
        self._cache = cache
        self._tables = tables
        self._window = architecture.sliding_window
        self._producers = {kind: architecture.owning_layers(kind)[-1] for kind in self._kinds}
        self._derive_keys = derive_keys
        order = v_only_columns(
            architecture.global_head_dim, pairs=architecture.global_rotary_pairs, device=cache.arena.device
        )
        self._v_only = (order, order.argsort())  # to the order of stored rows, and back
        self._places: list[tuple[int, int]] = []

    def begin(self, slots: Tensor, last: Tensor) -> None:
        self._places = list(zip(slots.tolist(), last.tolist(), strict=True))

    def attend(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        narrowed: Step | None,
        term: RowTerm | None = None,
    ) -> Tensor:
        assert narrowed is None
        assert term is None, "another model's, which has no adapters"
        kind = self._kinds[attention.layer]
        q = attention.heads(projected, rotation)[0]
        stored, natural = self._v_only
        v_only = "k" not in self._cache.planes(self._producers[kind])
        rows = [
            self._row(attention.layer, kind, queries, *place)
            for queries, place in zip(q[..., stored] if v_only else q, self._places, strict=True)
        ]
        output = torch.stack(rows)
        return (output[..., natural] if v_only else output).flatten(1)

    def _row(self, layer: int, kind: LayerKind, q: Tensor, slot: int, last: int) -> Tensor:
        """q [Hq, D] of one row -> [Hq, D]."""
        if last < 0:
            return torch.zeros_like(q)
        producer, cache = self._producers[kind], self._cache
        window = self._window if kind is LayerKind.SLIDING else None
        first = 0 if window is None else max(0, last - window + 1)
        page, pages = 0, global_rows(slot, last + 1, cache, self._tables)
        if window is not None:
            page, pages = sliding_rows(slot, first, last + 1, cache, self._tables)
        size = cache.geometry.page(kind).page_tokens
        softmax = SoftmaxAccumulator(q[None, None], kv_heads=cache.geometry.page(kind).planes[0].heads)
        audit = self._audit(layer, producer, slot, last, window)
        for begin in range(0, len(pages), KEYS_PER_PASS // size):
            table = torch.from_numpy(pages[begin : begin + KEYS_PER_PASS // size]).to(q.device)
            positions = (page + begin) * size + torch.arange(len(table) * size, device=q.device)
            mask = (positions >= first) & (positions <= last)
            values = cache.read_pages(producer, "v", table[None], q.dtype).masked_fill_(~mask[:, None], 0.0)
            if "k" in cache.planes(producer):
                keys = cache.read_pages(producer, "k", table[None], q.dtype)
            else:
                keys = self._derive_keys(producer, values, positions)
            softmax.add(keys, values, mask[None, None])
            if audit is not None and cache.stamps is not None:
                audit.observe(cache.stamps.read_pages(producer, table), mask[None])
        if audit is not None:
            audit.check()
        return softmax.result(q.dtype)[0, 0]

    def _audit(self, layer: int, producer: int, slot: int, last: int, window: int | None) -> ReadAudit | None:
        """In debug mode, a check of what the row reads."""
        if self._cache.stamps is None:
            return None
        texts = torch.from_numpy(self._cache.stamps.texts.of(slot, 0, last + 1))
        return ReadAudit(texts, layer, producer, torch.tensor([last]), window, torch.tensor([last]))
