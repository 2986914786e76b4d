"""The attention backend on GPUs: the kernels of `kernels.attention` over pages, tables and step buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.kernel_buffers import expansion_keys
from modelserve_worker.attention.table_audit import TableAudit
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.attention import triton_launches as kernels
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.paged_layout import LayerRows, layer_rows
from modelserve_worker.kernels.step import Segments, Step
from modelserve_worker.layers.attention import Attention
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.input_batch import QueryBlocks

StepRows = tuple[Tensor, Tensor, Tensor, Tensor]  # K, V [T, heads, D] as stored; their scales float16 [T, heads]


class KernelAttention:
    """Attention of the steps of one runner; `begin` a step, then `attend` once per layer in model order."""

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        cache: KVCache,
        tables: BlockTables,
        table: KernelTable,
        *,
        max_model_len: int,
        few_rows: int,
    ) -> None:
        """`table` names the kernels. `few_rows`: most of a step, in segments that are no chunks."""
        architecture, device = model.architecture, cache.arena.device
        self._model = model
        self._architecture = architecture
        self._tables = tables
        self._producer = [architecture.producer(layer) for layer in range(architecture.num_hidden_layers)]
        self._last_reader = {producer: layer for layer, producer in enumerate(self._producer)}
        self._frequencies = model.rope.inverse_frequencies(LayerKind.GLOBAL)
        self._waiting: dict[int, StepRows] = {}
        self._step: Step | None = None
        self._batch: ScheduledBatch | None = None
        self.use(cache)
        assert table.capability is not None
        self._capability = table.capability
        self._bound: dict[LayerKind, AttentionKernels] = {}
        self._readers: dict[tuple[LayerKind, int], AttentionKernels] = {}
        heads = architecture.num_attention_heads // model.parallel.size
        tokens, most = dict.fromkeys(LayerKind, 1), 0
        for kind, rows in self._layouts.items():
            self._bound[kind] = AttentionKernels.of(table, kind)
            tokens[kind] = max(1, self._bound[kind].chunk_rows // (heads // rows.heads))
            most = max(most, kernels.decode_workspace(rows, query_heads=heads))
        keys = expansion_keys(max_model_len)
        self.blocks = QueryBlocks(tokens[LayerKind.GLOBAL], tokens[LayerKind.SLIDING], keys)
        self._workspace = torch.empty(few_rows * most, dtype=torch.float32, device=device)
        self._rotation: kernels.Rotation | None = None
        self._scratch: Tensor | None = None
        self._pairs = architecture.global_rotary_pairs
        if LayerKind.GLOBAL in self._layouts:
            rows = self._layouts[LayerKind.GLOBAL]
            self._scratch = torch.empty(
                keys * kernels.scratch_per_key(rows, pairs=self._pairs), dtype=model.dtype, device=device
            )
            if rows.v_only:
                self._rotation = kernels.tile_rotation(
                    self._frequencies, pairs=self._pairs, keys=self._bound[LayerKind.GLOBAL].decode_keys,
                    longest=max_model_len, dtype=rows.dtype,
                )  # fmt: skip

    def use(self, cache: KVCache) -> None:
        """Attend over `cache` from now on, of the same geometry."""
        self._cache = cache
        self._audit = None if cache.stamps is None else TableAudit(cache, self._tables, self._producer)
        pages = (cache.geometry.global_page, cache.geometry.sliding_page)
        self._rows: dict[int, LayerRows] = {
            layer: layer_rows(cache.geometry, layer, pool_bytes=cache.pool_bytes)
            for page in pages
            for layer in page.layers
        }
        self._layouts = {page.kind: self._rows[page.layers[0]] for page in pages if page.layers}

    def begin(self, step: Step, batch: ScheduledBatch | None = None) -> None:
        """`batch`: the step as the host has it, for audits; None where a graph is captured."""
        self._step, self._batch = step, batch
        self._waiting.clear()  # of a step that failed
        if self._audit is not None:
            assert batch is not None, "a captured step cannot be audited"
            self._audit.begin(step, batch)

    def attend(
        self, attention: Attention, projected: Tensor, rotation: tuple[Tensor, Tensor], narrowed: Step | None
    ) -> Tensor:
        step = self._step
        assert step is not None
        layer, producer = attention.layer, self._producer[attention.layer]
        rows, own = self._rows[producer], layer == producer
        table, arena = self._tables.device[rows.kind], self._cache.arena
        bound, tokens, width = self._bound[rows.kind], projected.shape[0], attention.head_dim
        q = torch.empty((tokens, attention.q_heads, width), dtype=projected.dtype, device=projected.device)
        if own and rows.entries and step.chunks is not None:
            self._waiting[layer] = self._step_rows(rows, tokens)
        fresh = self._waiting.get(producer)
        key_weight = self._model.k_norm_weight(layer)
        pages: dict[str, Any] = {"rows": rows, "table": table, "arena": arena}
        kernels.prepare(
            projected, q, step, q_weight=attention.q_norm.weight, k_weight=key_weight, rotation=rotation,
            fresh=fresh if own else None, eps=attention.eps, pairs=self._pairs, **pages,
        )  # fmt: skip
        if self._audit is not None:
            self._audit.prepared(layer)
        if narrowed is not None:
            assert narrowed.kept is not None
            self._narrow(step, narrowed)
            step, q = narrowed, q.index_select(0, narrowed.kept)
        if self._audit is not None:
            self._audit.check(layer)
        output = torch.empty_like(q)
        beside = False
        if step.chunks is not None:  # first, since decodes may run beside them
            beside = bound.chunk(
                q, output, step, fresh=fresh, key_weight=key_weight, scratch=self._scratch,
                inverse_frequencies=self._frequencies, pairs=self._pairs, **pages,
            )  # fmt: skip
        if step.decode is not None:
            bound.decode(
                q, output, step, workspace=self._workspace, key_weight=key_weight, rotation=self._rotation,
                beside=beside, **pages,
            )  # fmt: skip
        if step.chunks is not None and rows.entries and layer == self._last_reader[producer]:
            kernels.commit(self._waiting.pop(producer), step, **pages)
            if self._audit is not None:
                self._audit.committed(producer)
        return output.flatten(1)

    def read(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        decode: Segments,
        kind: LayerKind,
    ) -> Tensor:
        """Queries alone [T, heads * D] over the last cache of a kind, as segments of one row each."""
        producer = self._architecture.owning_layers(kind)[-1]
        rows, width = self._rows[producer], attention.head_dim
        table, arena = self._tables.device[kind], self._cache.arena
        step = Step(
            positions=decode.starts, num_rows=decode.rows, global_slots=decode.slots, sliding_slots=decode.slots,
            commit_slots=decode.slots, decode=decode, chunks=None,
        )  # fmt: skip
        q = torch.empty((len(projected), attention.q_heads, width), dtype=projected.dtype, device=projected.device)
        key_weight = self._model.k_norm_weight(producer)
        pages: dict[str, Any] = {"rows": rows, "table": table, "arena": arena}
        kernels.prepare(
            projected, q, step, q_weight=attention.q_norm.weight, k_weight=key_weight, rotation=rotation, fresh=None,
            eps=attention.eps, pairs=self._pairs, **pages,
        )  # fmt: skip
        output = torch.empty_like(q)
        self._reader(rows, attention.q_heads).decode(
            q, output, step, workspace=self._workspace, key_weight=key_weight, rotation=self._rotation, **pages
        )
        return output.flatten(1)

    def _reader(self, rows: LayerRows, query_heads: int) -> AttentionKernels:
        """For queries of another model over rows of this one."""
        found = self._readers.get((rows.kind, query_heads))
        if found is None:
            found = AttentionKernels.over(rows, capability=self._capability, query_heads=query_heads, pairs=self._pairs)
            self._readers[rows.kind, query_heads] = found
        return found

    def _narrow(self, step: Step, narrowed: Step) -> None:
        for producer, waiting in self._waiting.items():
            rows = self._rows[producer]
            kernels.commit(waiting, step, rows=rows, table=self._tables.device[rows.kind], arena=self._cache.arena)
            if self._audit is not None:
                self._audit.committed(producer)
        self.begin(narrowed, None if self._batch is None else self._batch.narrowed())

    def _step_rows(self, rows: LayerRows, tokens: int) -> StepRows:
        shape, device = (tokens, rows.heads, rows.width), self._cache.arena.device
        values = [torch.empty(shape, dtype=kernels.element_dtype(rows), device=device) for _ in range(2)]
        scales = [torch.empty(shape[:2] if rows.int8 else (1, 1), dtype=torch.float16, device=device) for _ in range(2)]
        return values[0], values[1], scales[0], scales[1]


class KernelCacheReader:
    """A CacheReader of layers of these kinds, over what `attention` attends over."""

    def __init__(self, kinds: Sequence[LayerKind], attention: KernelAttention) -> None:
        self._kinds = tuple(kinds)
        self._attention = attention
        self._decode: Segments | None = None

    def begin(self, slots: Tensor, last: Tensor) -> None:
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        self._decode = Segments(slots, last, torch.ones_like(slots), rows, most=len(slots), most_rows=1)

    def attend(
        self, attention: Attention, projected: Tensor, rotation: tuple[Tensor, Tensor], narrowed: Step | None
    ) -> Tensor:
        assert narrowed is None
        assert self._decode is not None
        return self._attention.read(attention, projected, rotation, self._decode, kind=self._kinds[attention.layer])
