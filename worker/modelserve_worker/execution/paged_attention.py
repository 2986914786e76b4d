"""Attention of one step through the paged cache, in plain PyTorch: correct on the CPU and on a GPU, the kernels' twin.

Global layers write the step's rows first, then read pages. Sliding layers read the old window from pages and the step's
own rows from the projections, and write the rows that outlive the step after the last layer that reads them: the page
that takes a new row may be the one whose old rows are being read. Decode rows run in groups whose tables have one
width; prefill chunks run request by request. Scratch is bounded by KEYS_PER_PASS gathered keys and SCORES_PER_PASS
scores at a time, whatever the context: the attention phase of `modelserve.sizing.memory.activation_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.memory import KEYS_PER_PASS, SCORES_PER_PASS
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.kv_stamps import ReadAudit, stamp
from modelserve_worker.execution.plain_step import DecodeGroup, PlainStep, PrefillChunk
from modelserve_worker.kernels.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.row_codec import StoredRows, v_only_columns
from modelserve_worker.kernels.step_inputs import LastRows
from modelserve_worker.layers.attention import Attention

DeriveKeys = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, V [B, heads, K, D], positions [K]) -> K of the same shape and dtype: rope(k_norm.weight * V).

V is in the order of `v_only_columns`, and so is K.
"""


class PagedAttention:
    """The attention backend of one step; build one per step, call `attend` once per layer in model order."""

    def __init__(
        self,
        batch: ScheduledBatch,
        plan: Callable[[ScheduledBatch], PlainStep],
        *,
        cache: KVCache,
        architecture: ModelArchitecture,
        derive_keys: DeriveKeys,
    ) -> None:
        self._plan = plan
        self._batch = plan(batch)
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
        self, attention: Attention, projected: Tensor, rotation: tuple[Tensor, Tensor], last: LastRows | None
    ) -> Tensor:
        """The AttentionBackend's door. Raises AssertionError in debug mode when a query read a row that it may not."""
        q, k, v = attention.heads(projected, rotation)
        return self.attend_heads(attention.layer, q, k, v, last).flatten(1)

    def _narrow(self, last: LastRows) -> None:
        for producer, (stored, keys, values) in self._fresh.items():
            self._commit(producer, stored)
            self._fresh[producer] = stored, keys[last.rows], values[last.rows]
        assert last.inputs.batch is not None
        self._batch = self._plan(last.inputs.batch)
        self._narrowed = True

    def attend_heads(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, last: LastRows | None = None
    ) -> Tensor:
        """q [T, Hq, D]; k, v [T, Hkv, D] of the rank's heads, or None on KV-shared layers. Returns [T, Hq, D], or
        [R, Hq, D] of the rows of `last`."""
        if k is not None and v is not None:
            self._store(layer, k, v)
        if last is not None:
            self._narrow(last)
            q = q[last.rows]
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
        self._write(layer, self._batch.global_slots, rows, tokens=None)

    def _attend_global(self, layer: int, q: Tensor) -> Tensor:
        producer = self._architecture.producer(layer)
        output = torch.empty_like(q)
        for rows_of, attended in self._global_decodes(layer, producer, q):
            output[rows_of] = attended
        for chunk in self._batch.chunks:
            span = slice(chunk.offset, chunk.offset + chunk.end - chunk.start)
            output[span] = self._global_chunk(layer, producer, chunk, q[span])
        return output

    def _attend_sliding(self, layer: int, q: Tensor) -> Tensor:
        producer = self._architecture.producer(layer)
        stored, keys, values = self._fresh[producer]
        output = torch.empty_like(q)
        for rows_of, attended in self._sliding_decodes(layer, producer, q, keys, values):
            output[rows_of] = attended
        for chunk in self._batch.chunks:
            span = slice(chunk.offset, chunk.offset + chunk.end - chunk.start)
            output[span] = self._sliding_chunk(layer, producer, chunk, q[span], keys[span], values[span])
        if layer == self._last_reader[producer]:
            del self._fresh[producer]
            if not self._narrowed:
                self._commit(producer, stored)
        return output

    def _commit(self, producer: int, stored: dict[str, StoredRows]) -> None:
        """Write the step's rows that outlive it."""
        tokens = self._batch.sliding_tokens
        kept = {
            name: StoredRows(rows.values[tokens], None if rows.scale is None else rows.scale[tokens])
            for name, rows in stored.items()
        }
        self._write(producer, self._batch.sliding_slots, kept, tokens=tokens)

    def _decodes(self, kind: LayerKind) -> Iterator[DecodeGroup]:
        """Groups of decode rows, of so few rows that a pass over their tables gathers at most KEYS_PER_PASS keys."""
        page_tokens = self._cache.geometry.page(kind).page_tokens
        for group in self._batch.decodes[kind]:
            yield from group.parts(max(1, KEYS_PER_PASS // (group.table.shape[1] * page_tokens + 1)))

    def _global_decodes(self, layer: int, producer: int, q: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and what they attended to, group by group."""
        page = self._cache.geometry.global_page
        step = KEYS_PER_PASS // page.page_tokens  # only the table of a group of one row may be wider
        for group in self._decodes(LayerKind.GLOBAL):
            softmax = SoftmaxAccumulator(q[group.rows, None], kv_heads=page.planes[0].heads)
            audits = self._audits(layer, producer, group.tokens, window=None)
            for first in range(0, group.table.shape[1], step):
                table = group.table[:, first : first + step]
                positions = self._positions(first, table.shape[1], page.page_tokens)
                readable = positions <= group.positions[:, None]
                keys, values = self._read_global(producer, table, positions, readable, q.dtype)
                softmax.add(keys, values, readable[:, None])
                for index, audit in enumerate(audits):
                    audit.observe(self._stamps(producer, table[index]), readable[None, index])
            for audit in audits:
                audit.check()
            yield group.rows, softmax.result(q.dtype)[:, 0]

    def _global_chunk(self, layer: int, producer: int, chunk: PrefillChunk, q: Tensor) -> Tensor:
        """Keys in passes, expanded once each; within a pass the queries in blocks of bounded scores."""
        page = self._cache.geometry.global_page
        step = KEYS_PER_PASS // page.page_tokens
        own = torch.arange(chunk.start, chunk.end, device=q.device)
        keys_per_pass = min(KEYS_PER_PASS, chunk.global_rows.numel() * page.page_tokens)
        rows = max(1, SCORES_PER_PASS // (q.shape[1] * keys_per_pass))
        blocks = [slice(i, min(i + rows, q.shape[0])) for i in range(0, q.shape[0], rows)]
        softmaxes = [SoftmaxAccumulator(q[None, block], kv_heads=page.planes[0].heads) for block in blocks]
        audits = [self._audit(layer, producer, chunk.offset, own[block], window=None) for block in blocks]
        for first in range(0, chunk.global_rows.numel(), step):
            table = chunk.global_rows[None, first : first + step]
            positions = self._positions(first, table.shape[1], page.page_tokens)
            written = positions < chunk.end
            keys, values = self._read_global(producer, table, positions, written[None], q.dtype)
            for block, softmax, audit in zip(blocks, softmaxes, audits, strict=True):
                seen = chunk.start + block.stop - first * page.page_tokens  # keys up to the block's last query
                if seen <= 0:
                    continue
                mask = positions[:seen] <= own[block, None]
                softmax.add(keys[:, :, :seen], values[:, :, :seen], mask[None])
                if audit is not None:
                    audit.observe(self._stamps(producer, table[0])[:seen], mask)
        for audit in audits:
            if audit is not None:
                audit.check()
        return torch.cat([softmax.result(q.dtype)[0] for softmax in softmaxes])

    def _read_global(
        self, producer: int, table: Tensor, positions: Tensor, readable: Tensor, compute: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V [B, H, K, D] of pages [B, P]; V is 0 where nobody may read, since those bytes may be NaN."""
        values = self._cache.read_pages(producer, "v", table, compute)
        values.masked_fill_(~readable[:, None, :, None], 0.0)
        if "k" in self._cache.planes(producer):
            return self._cache.read_pages(producer, "k", table, compute), values
        return self._derive_keys(producer, values, positions), values

    def _sliding_decodes(
        self, layer: int, producer: int, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and what they attended to: the old window of each from its pages, then its own row."""
        page = self._cache.geometry.sliding_page
        for group in self._decodes(LayerKind.SLIDING):
            rows, at = group.rows, group.positions[:, None]
            positions = group.first[:, None] * page.page_tokens + self._positions(
                0, group.table.shape[1], page.page_tokens
            )
            readable = (positions > at - self._window) & (positions < at)
            mask = torch.cat((readable, torch.ones_like(at, dtype=torch.bool)), dim=1)
            keys = self._cache.read_pages(producer, "k", group.table, q.dtype)
            values = self._cache.read_pages(producer, "v", group.table, q.dtype)
            values.masked_fill_(~readable[:, None, :, None], 0.0)
            softmax = SoftmaxAccumulator(q[rows, None], kv_heads=page.planes[0].heads)
            softmax.add(
                torch.cat((keys, own_keys[rows, :, None]), dim=2),
                torch.cat((values, own_values[rows, :, None]), dim=2),
                mask[:, None],
            )
            audits = self._audits(layer, producer, group.tokens, window=self._architecture.sliding_window)
            for index, audit in enumerate(audits):
                token = group.tokens[index]
                own = self._own_stamps(producer, slice(token, token + 1))
                audit.observe(torch.cat((self._stamps(producer, group.table[index]), own)), mask[None, index])
                audit.check()
            yield rows, softmax.result(q.dtype)[:, 0]

    def _sliding_chunk(
        self, layer: int, producer: int, chunk: PrefillChunk, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        """Blocks of queries, each over the band of keys (old window, then own rows) that any of them may read."""
        page, window, length = self._cache.geometry.sliding_page, self._window, q.shape[0]
        base = max(0, chunk.start - window + 1)
        skip = base - chunk.sliding_first * page.page_tokens
        old = slice(skip, skip + chunk.start - base)
        # [H, old rows + own rows, D]: row i holds position base + i.
        keys, values = (
            torch.cat(
                (
                    self._cache.read_pages(producer, name, chunk.sliding_rows[None], q.dtype)[0, :, old],
                    own.transpose(0, 1),
                ),
                dim=1,
            )
            for name, own in (("k", own_keys), ("v", own_values))
        )
        rows = _band_rows(q.shape[1], window, length)
        outputs = []
        for first in range(0, length, rows):
            block = slice(first, min(first + rows, length))
            at = torch.arange(chunk.start + block.start, chunk.start + block.stop, device=q.device)
            band = slice(max(0, chunk.start + block.start - window + 1 - base), chunk.start + block.stop - base)
            distance = at[:, None] - torch.arange(base + band.start, base + band.stop, device=q.device)
            mask = (distance >= 0) & (distance < self._window)
            softmax = SoftmaxAccumulator(q[None, block], kv_heads=page.planes[0].heads)
            softmax.add(keys[None, :, band], values[None, :, band], mask[None])
            outputs.append(softmax.result(q.dtype)[0])
            audit = self._audit(layer, producer, chunk.offset, at, window=self._architecture.sliding_window)
            if audit is not None:
                own_rows = self._own_stamps(producer, slice(chunk.offset, chunk.offset + length))
                read = torch.cat((self._stamps(producer, chunk.sliding_rows)[old], own_rows))
                audit.observe(read[band], mask)
                audit.check()
        return torch.cat(outputs)

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

    def _own_stamps(self, layer: int, tokens: slice) -> Tensor:
        assert self._batch.owners is not None
        return stamp(self._batch.owners[tokens], layer, self._batch.positions[tokens].cpu())

    def _audit(self, layer: int, producer: int, token: int, at: Tensor, *, window: int | None) -> ReadAudit | None:
        """The check of one request's queries at positions `at`; None outside debug mode."""
        if self._batch.owners is None:
            return None
        return ReadAudit(self._batch.text_of(token), layer, producer, at.cpu(), window)

    def _audits(self, layer: int, producer: int, tokens: tuple[int, ...], *, window: int | None) -> list[ReadAudit]:
        """One check per decode row; empty outside debug mode."""
        found = [self._audit(layer, producer, t, self._batch.positions[t : t + 1], window=window) for t in tokens]
        return [audit for audit in found if audit is not None]


def _band_rows(query_heads: int, window: int, length: int) -> int:
    """Query rows r of one band with r * (window + r) * heads scores within SCORES_PER_PASS, at most `length`."""
    rows = length
    while rows > 1 and rows * (window + rows) * query_heads > SCORES_PER_PASS:
        rows = (rows + 1) // 2
    return rows
