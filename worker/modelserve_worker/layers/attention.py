"""Projections, norms and rotation around attention. Where rows are kept is the attention backend's affair."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from modelserve.architecture import ModelArchitecture
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.norm import RMSNorm, rms_normalize
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.rotary import rotate


class AttentionBackend(Protocol):
    """Attention of one step over the step's own rows and whatever earlier rows the backend keeps."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, query heads, D], normed and rotated; k and v [T, KV heads, D], normed, k rotated; of this rank.

        On KV-shared layers k and v are None: the backend reads the rows of `architecture.producer(layer)`.
        Scores are q.k times 1.0, softmax in float32, grouped-query by consecutive heads. Returns [T, query heads, D].
        """
        ...


class Attention(nn.Module):
    """One layer's attention: o(attend(rope(RMS_w(q)), rope(RMS_w(k)), RMS(v))).

    q, k and v projections are one matrix; layers with k_eq_v have no v rows in it (v is RMS of the raw k projection),
    KV-shared layers have q rows only.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        layer: int,
        parallel: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = architecture.layer_head_dim(layer)
        self.eps = architecture.rms_norm_eps
        heads = architecture.num_attention_heads
        q = parallel.shard(heads, what="num_attention_heads").scaled(self.head_dim)
        kv = parallel.kv_shard(heads, architecture.layer_kv_heads(layer)).scaled(self.head_dim)
        if not architecture.owns_cache(layer):
            shards = [q]
        elif architecture.k_from_v(layer):
            shards = [q, kv]
        else:
            shards = [q, kv, kv]
        self.qkv = ColumnParallelLinear(architecture.hidden_size, shards=shards, device=device, dtype=dtype)
        self.o = RowParallelLinear(architecture.hidden_size, shard=q, parallel=parallel, device=device, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, eps=self.eps, device=device, dtype=dtype)
        self.k_norm = (
            RMSNorm(self.head_dim, eps=self.eps, device=device, dtype=dtype) if architecture.owns_cache(layer) else None
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """x [T, H]; rotation = cos and sin, each [T, D / 2]. Returns [T, H]."""
        projected = [part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x)]
        q = rotate(self.q_norm(projected[0]), *rotation)
        k = v = None
        if self.k_norm is not None:
            k = rotate(self.k_norm(projected[1]), *rotation)
            v = rms_normalize(projected[-1], eps=self.eps).to(x.dtype)
        result: Tensor = self.o(attention.attend(self.layer, q, k, v).flatten(1))
        return result
