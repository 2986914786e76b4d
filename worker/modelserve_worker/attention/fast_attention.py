"""The attention backend on GPUs: the kernels of `kernels.attention` over pages, tables and step buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import KernelTable
from modelserve.sizing.kernel_buffers import expansion_keys
from modelserve_worker.attention.table_audit import TableAudit
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.attention import triton_launches as kernels
from modelserve_worker.kernels.attention.arguments import HeadNorms, LayerPages, Rotary, StepRows, Turns, element_dtype
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.paged_layout import LayerRows, layer_rows
from modelserve_worker.kernels.step import Segments, Step
from modelserve_worker.layers.attention import Attention
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.step_size import QueryBlocks


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
        self._tables = tables
        self._producer = [architecture.producer(layer) for layer in range(architecture.num_hidden_layers)]
        self._last_reader = {producer: layer for layer, producer in enumerate(self._producer)}
        self.last_producers = {architecture.kind(layer): layer for layer in sorted(self._last_reader)}
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
        self._turns: Turns | None = None
        self._scratch: Tensor | None = None
        self._pairs = architecture.global_rotary_pairs
        if LayerKind.GLOBAL in self._layouts:
            rows = self._layouts[LayerKind.GLOBAL]
            self._scratch = torch.empty(
                keys * kernels.scratch_per_key(rows, pairs=self._pairs), dtype=model.dtype, device=device
            )
            if rows.v_only:
                self._turns = kernels.tile_turns(
                    self._frequencies, pairs=self._pairs, keys=self._bound[LayerKind.GLOBAL].decode_keys,
                    longest=max_model_len, dtype=rows.dtype,
                )  # fmt: skip

    def use(self, cache: KVCache) -> None:
        """Attend over `cache` from now on, of the same geometry."""
        self._cache = cache
        self._audit = None if cache.stamps is None else TableAudit(cache, self._tables, self._producer)
        pages = (cache.geometry.global_page, cache.geometry.sliding_page)
        self._pages: dict[int, LayerPages] = {
            layer: LayerPages(
                layer_rows(cache.geometry, layer, pool_bytes=cache.pool_bytes),
                self._tables.device[page.kind],
                cache.arena,
            )
            for page in pages
            for layer in page.layers
        }
        self._layouts = {page.kind: self._pages[page.layers[0]].rows for page in pages if page.layers}

    def begin(self, step: Step, batch: ScheduledBatch | None = None) -> None:
        """`batch`: the step as the host has it, for audits; None where a graph is captured."""
        self._step, self._batch = step, batch
        self._waiting.clear()  # of a step that failed
        if self._audit is not None:
            assert batch is not None, "a captured step cannot be audited"
            self._audit.begin(step, batch)

    def attend(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        narrowed: Step | None,
        term: RowTerm | None = None,
    ) -> Tensor:
        assert self._step is not None
        layer = attention.layer
        return self.attend_over(
            self._producer[layer], attention, projected, rotation, self._step, narrowed, layer=layer, term=term
        )

    def attend_over(
        self,
        producer: int,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        step: Step,
        narrowed: Step | None = None,
        *,
        layer: int | None = None,
        term: RowTerm | None = None,
    ) -> Tensor:
        """Rows of `step` over what the layer `producer` stores: of one of the model's layers or, `layer` None, queries
        alone [T, heads * D] of another model's."""
        pages, own, tokens = self._pages[producer], layer == producer, projected.shape[0]
        rows = pages.rows
        bound = self._reader(rows, attention.q_heads) if layer is None else self._bound[rows.kind]
        audit = None if layer is None else self._audit
        q = torch.empty((tokens, attention.q_heads, rows.width), dtype=projected.dtype, device=projected.device)
        if own and rows.entries and step.chunks is not None:
            self._waiting[producer] = self._step_rows(rows, tokens)
        fresh = self._waiting.get(producer)
        key_weight = self._model.k_norm_weight(producer)
        norms = HeadNorms(attention.q_norm.weight, key_weight, attention.eps)
        kernels.prepare(
            projected, q, step, pages=pages, norms=norms, rotary=Rotary(*rotation), fresh=fresh if own else None,
            pairs=self._pairs, term=term,
        )  # fmt: skip
        if own and self._cache.rounded_to is not None:
            self._round(producer, step, fresh)
        if audit is not None:
            audit.prepared(attention.layer)
        if narrowed is not None:
            assert narrowed.kept is not None
            self._narrow(step, narrowed)
            step, q = narrowed, q.index_select(0, narrowed.kept)
        if audit is not None:
            audit.check(attention.layer)
        output = torch.empty_like(q)
        beside = False
        if step.chunks is not None:  # first, since decodes may run beside them
            beside = bound.chunk(
                q, output, step, pages=pages, fresh=fresh, key_weight=key_weight, scratch=self._scratch,
                inverse_frequencies=self._frequencies, pairs=self._pairs,
            )  # fmt: skip
        if step.decode is not None:
            bound.decode(
                q, output, step, pages=pages, workspace=self._workspace, key_weight=key_weight, turns=self._turns,
                beside=beside,
            )  # fmt: skip
        if step.chunks is not None and rows.entries and layer == self._last_reader[producer]:
            kernels.commit(self._waiting.pop(producer), step, pages=pages)
            if audit is not None:
                audit.committed(producer)
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
            kernels.commit(waiting, step, pages=self._pages[producer])
            if self._audit is not None:
                self._audit.committed(producer)
        self.begin(narrowed, None if self._batch is None else self._batch.narrowed())

    def _round(self, layer: int, step: Step, fresh: StepRows | None) -> None:
        """What `prepare` has stored of a step that tries another format, in pages and in step buffers."""
        kind = self._pages[layer].rows.kind
        slots = step.sliding_slots if kind is LayerKind.SLIDING else step.global_slots
        self._cache.round_stored(layer, self._tables.device[kind], slots, step.positions)
        for rows in () if fresh is None else (fresh.k, fresh.v):
            rows.copy_(self._cache.rounded(rows))

    def _step_rows(self, rows: LayerRows, tokens: int) -> StepRows:
        shape, device = (tokens, rows.heads, rows.width), self._cache.arena.device
        values = [torch.empty(shape, dtype=element_dtype(rows), device=device) for _ in range(2)]
        scales = [torch.empty(shape[:2] if rows.int8 else (1, 1), dtype=torch.float16, device=device) for _ in range(2)]
        return StepRows(*values, *scales)


class KernelCacheReader:
    """A CacheReader of layers of these kinds, over what `attention` attends over."""

    def __init__(self, kinds: Sequence[LayerKind], attention: KernelAttention) -> None:
        self._kinds = tuple(kinds)
        self._attention = attention
        self._step: Step | None = None

    def begin(self, slots: Tensor, last: Tensor) -> None:
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        decode = Segments(slots, last, torch.ones_like(slots), rows, most=len(slots), most_rows=1)
        self._step = Step(last, rows, slots, slots, slots, decode, chunks=None)

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
        assert self._step is not None
        producer = self._attention.last_producers[self._kinds[attention.layer]]
        return self._attention.attend_over(producer, attention, projected, rotation, self._step)
