"""Attention by the definition, over one whole sequence at once, without pages or cache."""

from __future__ import annotations

import torch
from full_logits import compute_logits
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.attention import Attention
from modelserve_worker.layers.rotary import rotate
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM


class DenseAttention:
    """An AttentionBackend for one sequence from position 0. `window` may differ from the model's, for mutations."""

    def __init__(self, architecture: ModelArchitecture, *, window: int | None = None) -> None:
        self.architecture = architecture
        self.window = architecture.sliding_window if window is None else window
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def producer(self, layer: int) -> int:
        return self.architecture.producer(layer)

    def attend(
        self,
        attention: Attention,
        projected: Tensor,
        rotation: tuple[Tensor, Tensor],
        narrowed: Step | None,
        term: RowTerm | None = None,
    ) -> Tensor:
        attended = self.attend_heads(attention.layer, *attention.heads(projected, rotation)).flatten(1)
        return attended if narrowed is None else attended[narrowed.kept]

    def attend_heads(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, Hq, D]; k, v [T, Hkv, D], None on KV-shared layers. Returns [T, Hq, D]."""
        if k is not None and v is not None:
            self.rows[layer] = (self.keys(layer, k, v), v)
        k, v = self.rows[self.producer(layer)]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        query, key = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None, :]
        allowed = key <= query
        if self.architecture.kind(layer) is LayerKind.SLIDING:
            allowed &= key > query - self.window
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()).masked_fill(~allowed, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.float()).to(q.dtype)

    def keys(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """The keys to keep of a layer's own k and v."""
        return k


class DerivedKeyAttention(DenseAttention):
    """Keeps V alone where the model allows it, and derives K = rope(k_norm.weight * V) as a V-only cache does."""

    def __init__(self, model: Gemma4ForCausalLM) -> None:
        super().__init__(model.architecture)
        self.model = model

    def k_norm_weight(self, layer: int) -> Tensor:
        return self.model.k_norm_weight(layer)

    def keys(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        if not self.architecture.k_from_v(layer):
            return k
        cos, sin = self.model.rope.cos_sin(LayerKind.GLOBAL, torch.arange(v.shape[0]))
        return rotate(v * self.k_norm_weight(layer), cos, sin)


def last_logits(model: Gemma4ForCausalLM, token_ids: list[int]) -> Tensor:
    """float32 [1, vocab] of the last row of a sequence, computed alone from the last cache on; of a model whose layers
    share none."""
    row = torch.tensor([len(token_ids) - 1], dtype=torch.int32)
    narrowed = Step(row, torch.ones_like(row), row, row, row, None, None, kept=row)
    backend, positions = DenseAttention(model.architecture), torch.arange(len(token_ids))
    return compute_logits(model, model(torch.tensor(token_ids), positions, backend, narrowed=narrowed))


def dense_logits(model: Gemma4ForCausalLM, token_ids: list[int], attention: DenseAttention | None = None) -> Tensor:
    """float32 [len(token_ids), vocab] of one whole sequence in one step."""
    positions = torch.arange(len(token_ids))
    backend = attention or DenseAttention(model.architecture)
    return compute_logits(model, model(torch.tensor(token_ids), positions, backend))
