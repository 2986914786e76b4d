"""Projections, norms and rotation around attention. Where rows are kept is the attention backend's affair."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.elementwise.elementwise import rms_normalize
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.adapter_rows import Read
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.rotary import rotate


class AttentionBackend(Protocol):
    """Attention of one step over the step's own rows and whatever earlier rows the backend keeps."""

    def attend(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        narrowed: Step | None,
        term: RowTerm | None = None,
    ) -> Tensor:
        """projected [T, columns] of `attention.qkv`, and a term that is still to be added to it; rotation: cos and sin,
        float32 [T, D / 2]. Returns [T, heads * D].

        Queries and keys are normed and rotated, values normed (`attention.heads`). On KV-shared layers there are only
        queries, and the backend reads the rows of `architecture.producer(attention.layer)`. Scores are q.k times 1.0,
        softmax in float32, grouped-query by consecutive heads.

        With `narrowed` all T rows are stored, and so is whatever waits of layers before, but of its R rows
        `narrowed.kept` alone is there attention: [R, heads * D]. Queries of other rows may be anything, NaN included.
        The layers that follow, all KV-shared, bring those R rows.
        """
        ...


class Attention(nn.Module):
    """One layer's attention: o(attend(rope(RMS_w(q)), rope(RMS_w(k)), RMS(v))).

    q, k and v projections are one matrix; layers with k_eq_v have no v rows in it (v is RMS of the raw k projection),
    KV-shared layers have q rows only.
    """

    def __init__(self, architecture: ModelArchitecture, placement: Placement, *, layer: int) -> None:
        super().__init__()
        parallel = placement.parallel
        self.layer = layer
        self.adapter_rows = placement.adapter_rows
        self.head_dim = architecture.layer_head_dim(layer)
        self.q_heads = architecture.num_attention_heads // parallel.size
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
        hidden = architecture.hidden_size
        self.qkv = ColumnParallelLinear(TextLinear.QKV, hidden, placement, shards=shards)
        # With experts, what norms the sum chooses experts, too, and takes no term by itself.
        self._apart = parallel.size == 1 and not architecture.num_experts
        self.o = RowParallelLinear(TextLinear.OUTPUT, hidden, placement, shard=q, in_parts=parallel.size == 1)
        self.q_norm = RMSNorm(self.head_dim, placement, eps=self.eps)
        self.k_norm = RMSNorm(self.head_dim, placement, eps=self.eps) if architecture.owns_cache(layer) else None

    def heads(self, projected: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q [T, query heads, D], k and v [T, KV heads, D] as attention takes them; None on KV-shared layers."""
        counts = [shard.size // self.head_dim for shard in self.qkv.shards]
        parts = torch.split(projected.view(projected.shape[0], sum(counts), self.head_dim), counts, dim=1)
        q = rotate(self.q_norm(parts[0]), *rotation)
        if self.k_norm is None:
            return q, None, None
        k = rotate(self.k_norm(parts[1]), *rotation)
        return q, k, rms_normalize(parts[-1], eps=self.eps).to(projected.dtype)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionBackend, narrowed: Step | None
    ) -> tuple[Tensor, RowTerm | None]:
        """x [T, H]; rotation: cos and sin, float32 [T, D / 2]. Returns [T, H], or with `narrowed` [R, H], to be added
        over ranks, and a term that is still to be added to it, `StoredMatrix.apart`."""
        projected, qkv_term = self.qkv.matrix.apart(x, Read.BY_ELEMENT)
        attended = attention.attend(self, projected, rotation, narrowed, qkv_term)
        if narrowed is not None:
            self.adapter_rows.narrow()
        return self.o.apart(attended) if self._apart else (self.o(attended), None)
