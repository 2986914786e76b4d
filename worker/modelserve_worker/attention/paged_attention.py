"""Attention of one step through the paged cache, in plain PyTorch: correct on any device, the kernels' reference.

Global layers write the step's rows first, then read pages. Sliding layers read the old window from pages and the step's
own rows from the projections, and write the rows that outlive the step after the last layer that reads them: the page
that takes a new row may be the one whose old rows are being read. Segments of few rows run in groups whose tables have
one width, longer ones by themselves. Scratch is bounded by KEYS_PER_PASS gathered keys and SCORES_PER_PASS scores at a
time, whatever the context; its bytes are the attention phase of `modelserve.sizing.memory.activation_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.memory import KEYS_PER_PASS, SCORES_PER_PASS
from modelserve_worker.attention.page_groups import PageGroups, SegmentGroup
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.kv_stamps import ReadAudit, stamp
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.attention.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.attention.row_codec import StoredRows, v_only_columns
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import Attention

DeriveKeys = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, V [B, heads, K, D], positions [K]) -> K of the same shape and dtype: rope(k_norm.weight * V).

V is in the order of `v_only_columns`, and so is K.
"""


class PagedAttention:
    """The attention backend of one step; build one per step, call `attend` once per layer in model order."""

    keys_per_pass, scores_per_pass = KEYS_PER_PASS, SCORES_PER_PASS

    def __init__(
        self,
        batch: ScheduledBatch,
        plan: Callable[[ScheduledBatch], PageGroups],
        *,
        cache: KVCache,
        architecture: ModelArchitecture,
        derive_keys: DeriveKeys,
    ) -> None:
        self._plan = plan
        self._batch = batch
        self._step = plan(batch)
        self._narrowed = False
        self._cache = cache
        order = v_only_columns(
            architecture.global_head_dim, pairs=architecture.global_rotary_pairs, device=cache.arena.device
        )
        self._v_only = (order, order.argsort())  # to the order of stored rows, and back
        self._architecture = architecture
        self._derive_keys = derive_keys
        self._window = cache.geometry.window
        self._last_reader = {architecture.producer(i): i for i in range(architecture.num_hidden_layers)}
        # Rows of the step that sliding layers read before they are in a page: stored, and decoded K and V [T, H, D].
        self._fresh: dict[int, tuple[dict[str, StoredRows], Tensor, Tensor]] = {}

    def attend(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        narrowed: Step | None,
        term: RowTerm | None = None,
    ) -> Tensor:
        """As of AttentionBackend. Raises AssertionError in debug mode when a query read a row that it may not."""
        assert term is None, "plain products have theirs in them"
        q, k, v = attention.heads(projected, rotation)
        return self.attend_heads(attention.layer, q, k, v, narrowed).flatten(1)

    def _narrow(self, kept: Tensor) -> None:
        for producer, (stored, keys, values) in self._fresh.items():
            self._commit(producer, stored)
            self._fresh[producer] = stored, keys[kept], values[kept]
        self._step = self._plan(self._batch.narrowed())
        self._narrowed = True

    def attend_heads(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, narrowed: Step | None = None
    ) -> Tensor:
        """q [T, Hq, D]; k, v [T, Hkv, D] of the rank's heads, or None on KV-shared layers. Returns [T, Hq, D], or
        [R, Hq, D] of the R rows of `narrowed`."""
        if k is not None and v is not None:
            self._store(layer, k, v)
        if narrowed is not None:
            assert narrowed.kept is not None
            self._narrow(narrowed.kept)
            q = q[narrowed.kept]
        if self._architecture.kind(layer) is LayerKind.SLIDING:
            return self._attend_sliding(layer, q)
        if "k" in self._cache.planes(self._architecture.producer(layer)):
            return self._attend_global(layer, q)
        stored, natural = self._v_only
        return self._attend_global(layer, q[..., stored])[..., natural]

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Global rows go to pages, sliding ones wait beside what readers of their stored form see."""
        if self._architecture.kind(layer) is LayerKind.SLIDING:
            stored = {"k": self._cache.encode(k), "v": self._cache.encode(v)}
            keys, values = (self._cache.decode(stored[name], k.dtype) for name in ("k", "v"))
            self._fresh[layer] = (stored, keys, values)
            return
        planes = self._cache.planes(layer)
        fresh = {"k": k, "v": v} if "k" in planes else {"v": v[..., self._v_only[0]]}
        rows = {name: self._cache.encode(fresh[name]) for name in planes}
        self._write(layer, self._step.global_slots, rows, tokens=None)

    def _attend_global(self, layer: int, q: Tensor) -> Tensor:
        producer = self._architecture.producer(layer)
        output = torch.empty_like(q)
        for group in self._groups(LayerKind.GLOBAL):
            output[group.rows] = self._global_group(layer, producer, group, q[group.rows])
        return output

    def _attend_sliding(self, layer: int, q: Tensor) -> Tensor:
        producer = self._architecture.producer(layer)
        stored, keys, values = self._fresh[producer]
        output = torch.empty_like(q)
        for group in self._groups(LayerKind.SLIDING):
            rows = group.rows
            output[rows] = self._sliding_group(layer, producer, group, q[rows], keys[rows], values[rows])
        if layer == self._last_reader[producer]:
            del self._fresh[producer]
            if not self._narrowed:
                self._commit(producer, stored)
        return output

    def _commit(self, producer: int, stored: dict[str, StoredRows]) -> None:
        """Write the step's rows that outlive it."""
        tokens = self._step.sliding_tokens
        kept = {
            name: StoredRows(rows.values[tokens], None if rows.scale is None else rows.scale[tokens])
            for name, rows in stored.items()
        }
        self._write(producer, self._step.sliding_slots, kept, tokens=tokens)

    def _groups(self, kind: LayerKind) -> Iterator[SegmentGroup]:
        """Groups of so few segments that a pass over their tables gathers at most KEYS_PER_PASS keys, times their
        rows."""
        page_tokens = self._cache.geometry.page(kind).page_tokens
        for group in self._step.groups[kind]:
            keys = (group.table.shape[1] * page_tokens + group.num_rows) * group.num_rows
            yield from group.parts(max(1, self.keys_per_pass // keys))

    def _global_group(self, layer: int, producer: int, group: SegmentGroup, q: Tensor) -> Tensor:
        """q [B, n, Hq, D]. Keys in passes, expanded once each; within a pass the queries in blocks of bounded
        scores."""
        page = self._cache.geometry.global_page
        step = self.keys_per_pass // page.page_tokens  # only the table of a group of one segment may be wider
        width, length = group.table.shape[1], group.num_rows
        rows = max(1, self.scores_per_pass // (len(q) * q.shape[2] * min(self.keys_per_pass, width * page.page_tokens)))
        blocks = [slice(i, min(i + rows, length)) for i in range(0, length, rows)]
        softmaxes = [SoftmaxAccumulator(q[:, block], kv_heads=page.planes[0].heads) for block in blocks]
        audits = [self._audits(layer, producer, group, block, window=None) for block in blocks]
        for first in range(0, width, step):
            table = group.table[:, first : first + step]
            positions = self._positions(first, table.shape[1], page.page_tokens)
            written = positions <= group.positions[:, -1:]
            keys, values = self._read_global(producer, table, positions, written, q.dtype)
            for block, softmax, of_block in zip(blocks, softmaxes, audits, strict=True):
                seen = len(positions)
                if group.alone:  # keys up to the block's last query
                    seen = group.starts[0] + block.stop - first * page.page_tokens
                if seen <= 0:
                    continue
                mask = positions[:seen] <= group.positions[:, block, None]
                softmax.add(keys[:, :, :seen], values[:, :, :seen], mask)
                for audit, pages, read in zip(of_block, table, mask, strict=False):
                    audit.observe(self._stamps(producer, pages)[:seen], read)
        check_audits(audits)
        return torch.cat([softmax.result(q.dtype) for softmax in softmaxes], dim=1)

    def _read_global(
        self, producer: int, table: Tensor, positions: Tensor, readable: Tensor, compute: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V [B, H, K, D] of pages [B, P]; V is 0 where nobody may read, since those bytes may be NaN."""
        values = self._cache.read_pages(producer, "v", table, compute)
        values.masked_fill_(~readable[:, None, :, None], 0.0)
        if "k" in self._cache.planes(producer):
            return self._cache.read_pages(producer, "k", table, compute), values
        return self._derive_keys(producer, values, positions), values

    def _sliding_group(
        self, layer: int, producer: int, group: SegmentGroup, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        """q [B, n, Hq, D]; K and V of the same rows [B, n, H, D]. Blocks of queries, each over the band of keys (old
        window from pages, then own rows) that any of them may read."""
        page, window, length = self._cache.geometry.sliding_page, self._window, group.num_rows
        old = group.first_page[:, None] * page.page_tokens + self._positions(0, group.table.shape[1], page.page_tokens)
        starts = group.positions[:, :1]
        readable = (old > starts - window) & (old < starts)
        keys = self._cache.read_pages(producer, "k", group.table, q.dtype)
        values = self._cache.read_pages(producer, "v", group.table, q.dtype)
        values.masked_fill_(~readable[:, None, :, None], 0.0)
        # [B, H, old rows + own rows, D], and what position each is at; -1: nobody reads it.
        keys, values = (
            torch.cat((pages, own.transpose(1, 2)), dim=2) for pages, own in ((keys, own_keys), (values, own_values))
        )
        at = torch.cat((old.masked_fill(~readable, -1), group.positions), dim=1)
        visible = group.last_seen
        ahead = 0 if group.visible is None else int((visible - group.positions).max())
        rows = _band_rows(q.shape[2], window + ahead, length, self.scores_per_pass) if group.alone else length
        outputs, audits = [], []
        for first in range(0, length, rows):
            block = slice(first, min(first + rows, length))
            last = block.stop if not ahead else int(visible[:, block].max()) - group.starts[0] + 1
            band = slice(0, old.shape[1] + last)
            if first >= window:  # no query of the block sees the old window
                band = slice(old.shape[1] + first - window + 1, band.stop)
            queries, until = group.positions[:, block, None], visible[:, block, None]
            mask = (at[:, None, band] >= 0) & (at[:, None, band] <= until) & (at[:, None, band] > queries - window)
            softmax = SoftmaxAccumulator(q[:, block], kv_heads=page.planes[0].heads)
            softmax.add(keys[:, :, band], values[:, :, band], mask)
            outputs.append(softmax.result(q.dtype))
            audits.append(self._audits(layer, producer, group, block, window=self._architecture.sliding_window))
            for audit, pages, own, read in zip(audits[-1], group.table, group.rows, mask, strict=False):
                stamps = torch.cat((self._stamps(producer, pages), self._own_stamps(producer, own)))
                audit.observe(stamps[band], read)
        check_audits(audits)
        return torch.cat(outputs, dim=1)

    def _write(self, layer: int, slots: Tensor, rows: dict[str, StoredRows], *, tokens: Tensor | None) -> None:
        self._cache.write_rows(layer, slots, rows)
        if self._cache.stamps is not None:
            stamps = self._own_stamps(layer, slice(None))
            self._cache.stamps.write(layer, slots, stamps if tokens is None else stamps[tokens.cpu()])

    def _positions(self, first_page: int, pages: int, page_tokens: int) -> Tensor:
        """Positions [pages * page_tokens] of consecutive logical pages."""
        return torch.arange(
            first_page * page_tokens, (first_page + pages) * page_tokens, device=self._cache.arena.device
        )

    def _stamps(self, layer: int, page_rows: Tensor) -> Tensor:
        assert self._cache.stamps is not None
        return self._cache.stamps.read_pages(layer, page_rows)

    def _own_stamps(self, layer: int, rows: slice | Tensor) -> Tensor:
        assert self._step.owners is not None
        rows = rows if isinstance(rows, slice) else rows.cpu()
        return stamp(self._step.owners[rows], layer, self._step.positions.cpu()[rows])

    def _audits(
        self, layer: int, producer: int, group: SegmentGroup, block: slice, *, window: int | None
    ) -> list[ReadAudit]:
        """A check of these queries for each segment; empty outside debug mode."""
        if self._step.owners is None:
            return []
        return [
            ReadAudit(self._step.text_of(first), layer, producer, positions[block].cpu(), window, last[block].cpu())
            for first, positions, last in zip(group.firsts, group.positions, group.last_seen, strict=True)
        ]


def check_audits(audits: Sequence[Sequence[ReadAudit]]) -> None:
    """Raise AssertionError when a query read a row that it may not."""
    for audit in (audit for of_block in audits for audit in of_block):
        audit.check()


def _band_rows(query_heads: int, window: int, length: int, most_scores: int) -> int:
    """Query rows r of one band with r * (window + r) * heads scores within `most_scores`, at most `length`."""
    rows = length
    while rows > 1 and rows * (window + rows) * query_heads > most_scores:
        rows = (rows + 1) // 2
    return rows
