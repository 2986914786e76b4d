"""What a drafter reads and keeps in the pool of its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelserve.model.architecture import LayerKind
from modelserve_worker.attention.cache_reader import PlainCacheReader
from modelserve_worker.attention.draft_rows import PlainDraftRows
from modelserve_worker.attention.paged_attention import DeriveKeys
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import CacheReader, DraftLayers, DraftRows
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.block_tables import BlockTables

if TYPE_CHECKING:
    from modelserve_worker.attention.fast_attention import KernelAttention


class PoolOfTarget:
    """The `TargetCaches` of one pool and the block tables over it: kernels' where the target has `kernels`, else plain
    PyTorch's, which make the keys of V-only rows by `derive_keys`."""

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        cache: KVCache,
        tables: BlockTables,
        *,
        kernels: KernelAttention | None,
        derive_keys: DeriveKeys | None = None,
    ) -> None:
        self._model, self._cache, self._tables = model, cache, tables
        self._kernels, self._derive_keys = kernels, derive_keys

    def cache_reader(self, kinds: Sequence[LayerKind]) -> CacheReader:
        if self._kernels is not None:
            from modelserve_worker.attention.fast_attention import KernelCacheReader  # Triton, on GPUs alone

            return KernelCacheReader(kinds, self._kernels)
        assert self._derive_keys is not None
        return PlainCacheReader(
            kinds, cache=self._cache, tables=self._tables, architecture=self._model.architecture,
            derive_keys=self._derive_keys,
        )  # fmt: skip

    def draft_rows(self, layers: DraftLayers) -> DraftRows:
        if self._kernels is not None:
            from modelserve_worker.attention.kernel_draft_rows import KernelDraftRows  # Triton, on GPUs alone

            return KernelDraftRows(layers, self._cache, self._tables)
        return PlainDraftRows(layers, self._cache, self._tables)
