"""Random projections of some requests, pushed through the paged cache, and the attention that they must give."""

from __future__ import annotations

from functools import partial

import torch

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.attention.page_groups import page_groups
from modelserve_worker.attention.paged_attention import PagedAttention
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.attention.row_codec import decode_rows, encode_rows, v_only_columns
from modelserve_worker.layers.rotary import RotaryEmbedding, rotate
from modelserve_worker.step.block_tables import BlockTables

CPU = torch.device("cpu")
POOL = 1 << 24


class Projections:
    """Random q, k, v of every layer and position of some requests, and the attention they must give."""

    def __init__(self, architecture, lengths: dict[str, int], *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.architecture = architecture
        self.rope = RotaryEmbedding(architecture, device=CPU)
        self.norm = torch.rand(architecture.global_head_dim, generator=generator) + 0.5
        self.rows: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        for name, length in lengths.items():
            for layer in range(architecture.num_hidden_layers):
                width, kv_heads = architecture.layer_head_dim(layer), architecture.layer_kv_heads(layer)
                q = torch.randn(length, architecture.num_attention_heads, width, generator=generator)
                v = torch.randn(length, kv_heads, width, generator=generator)
                k = torch.randn(length, kv_heads, width, generator=generator) / width**0.5
                if architecture.k_from_v(layer):
                    k = self.derive(layer, v.transpose(0, 1)[None], torch.arange(length))[0].transpose(0, 1)
                self.rows[name, layer] = (q, k, v)

    def derive(self, layer: int, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rope.cos_sin(LayerKind.GLOBAL, positions)
        scaled = values * self.norm / values.shape[-1] ** 0.5
        flat = rotate(scaled.permute(2, 0, 1, 3).flatten(1, 2), cos, sin)
        return flat.unflatten(1, values.shape[:2]).permute(1, 2, 0, 3)

    def derive_stored(self, layer: int, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`derive` of rows in the order in which rows of V alone are stored."""
        architecture = self.architecture
        order = v_only_columns(architecture.global_head_dim, pairs=architecture.global_rotary_pairs)
        return self.derive(layer, values[..., order.argsort()], positions)[..., order]

    def stored(self, name: str, layer: int, dtype: KVCacheDtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as any reader must see them."""
        _, k, v = self.rows[name, self.architecture.producer(layer)]
        k, v = (decode_rows(encode_rows(rows, dtype), dtype, torch.float32) for rows in (k, v))
        return k, v

    def dense(self, name: str, layer: int, dtype: KVCacheDtype = KVCacheDtype.FLOAT32, *, derived: bool = False):
        q = self.rows[name, layer][0].double()
        k, v = self.stored(name, layer, dtype)
        if derived and self.architecture.k_from_v(layer):
            k = self.derive(layer, v.transpose(0, 1)[None], torch.arange(v.shape[0]))[0].transpose(0, 1)
        group = q.shape[1] // k.shape[1]
        k, v = (rows.double().repeat_interleave(group, dim=1) for rows in (k, v))
        distance = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
        mask = distance >= 0
        if self.architecture.kind(layer) is LayerKind.SLIDING:
            mask &= distance < self.architecture.sliding_window
        scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def tables_for(cache: KVCache) -> BlockTables:
    return BlockTables(cache.geometry, max_num_seqs=8, max_model_len=600, device=CPU)


def run_steps(
    projections, cache, driver, steps: list[list[tuple[str, int]]], *, tables: BlockTables | None = None,
    backend: type[PagedAttention] = PagedAttention,
):  # fmt: skip
    """Push the chunks of every step through the cache, layer by layer: outputs per (request, layer)."""
    tables = tables or tables_for(cache)
    architecture = projections.architecture
    outputs: dict[tuple[str, int], list[torch.Tensor]] = {key: [] for key in projections.rows}
    for step in steps:
        shares = driver.ordered(*(driver.share(name, [5] * count) for name, count in step))
        batch = driver.batch(*shares)
        for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
            tables.apply({kind: updates})
        attention = backend(
            batch,
            partial(page_groups, cache=cache, tables=tables),
            cache=cache,
            architecture=architecture,
            derive_keys=projections.derive_stored,
        )
        for layer in range(architecture.num_hidden_layers):
            spans = [(s.request_id, slice(s.start, s.start + len(s.token_ids))) for s in shares]
            q, k, v = (torch.cat([projections.rows[n, layer][i][s] for n, s in spans]) for i in range(3))
            owns = architecture.owns_cache(layer)
            attended = attention.attend_heads(layer, q, k if owns else None, v if owns else None)
            for (name, _), part in zip(spans, attended.split([s.stop - s.start for _, s in spans]), strict=True):
                outputs[name, layer].append(part)
    return {key: torch.cat(parts) for key, parts in outputs.items() if parts}


def poisoned_cache(geometry, *, stamps: bool = True, of: type[KVCache] = KVCache) -> KVCache:
    """A cache whose unwritten bytes are NaN in every floating format."""
    cache = of(geometry, POOL, device=CPU, debug_stamps=stamps)
    cache.arena.fill_(0xFF)
    return cache
