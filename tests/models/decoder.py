"""A differentiable Gemma 4 decoder over packed rows, for training: same formulas as the engine, no cache.

Rows hold several documents back to back; a token sees its own document only. Sliding layers attend block by block,
global layers chunk by chunk, and the last layer computes only the positions whose next token is trained. Weights are
float32 masters by checkpoint name, matrix products run in `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_worker.layers.rotary import RotaryEmbedding

IGNORED = -100  # a label that is not trained
QUERIES_PER_CHUNK = 1024  # of global attention; bounds the scores of one product


@dataclass(frozen=True)
class Rows:
    """B rows of L tokens. `positions` restart with every document; `documents` numbers them, padding is -1.

    `predict` [B, M] are the places whose next token is trained, `labels` [B, M] those tokens, -100 where M is padding.
    All int64.
    """

    input_ids: Tensor
    positions: Tensor
    documents: Tensor
    predict: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Rows:
        moved = (t.to(device, non_blocking=True) for t in vars(self).values())
        return Rows(*moved)


def rms_norm(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)


def norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, heads, D], cos and sin [B, L, 1, D / 2]; result in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    first, second = y.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def unit_values(x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The float32 residual x plus RMS_w(y)."""
    y = y.float()
    return x + y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def masked_softmax(
    scores: Tensor, query_at: Tensor, key_at: Tensor, query_document: Tensor, key_document: Tensor, window: int
) -> Tensor:
    """scores [N, KV heads, Q, groups, K]; places in the row and documents [N, Q] and [N, K]. Softmax in float32."""
    distance = query_at[:, :, None] - key_at[:, None, :]
    allowed = (distance >= 0) & (distance < window) & (query_document[:, :, None] == key_document[:, None, :])
    return scores.float().masked_fill(~allowed[:, None, :, None], -1e30).softmax(-1).to(scores.dtype)


class Decoder:
    """`weights` by checkpoint name without prefix. `compiled` fuses the element-wise parts (a GPU with Triton)."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.dtype = dtype
        device = weights["norm.weight"].device
        self.rope = RotaryEmbedding(architecture, device=device)

        def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(function, dynamic=True) if compiled else function

        self.norm, self.norm_rotate, self._unit = fused(rms_norm), fused(norm_and_rotate), fused(unit_values)
        self.add_norm, self._gelu, self._softmax = fused(add_norm), fused(gated_gelu), fused(masked_softmax)

    def logits(self, rows: Rows) -> Tensor:
        """float32 [B, M, vocab] at `rows.predict`."""
        hidden = self.hidden(rows)
        logits = functional.linear(hidden, self.matrix("embed_tokens.weight")).float()
        cap = self.architecture.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def hidden(
        self,
        rows: Rows,
        *,
        caches: dict[LayerKind, tuple[Tensor, Tensor]] | None = None,
        outputs: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """[B, M, H] after the final norm at `rows.predict`. `caches` receives K and V of each kind's last owner,
        `outputs` float32 [B, L, H] behind each layer before the last that owns a cache."""
        a = self.architecture
        x = functional.embedding(rows.input_ids, self.weights["embed_tokens.weight"]) * a.hidden_size**0.5
        per_layer = self._per_layer(rows.input_ids, x) if a.hidden_size_per_layer_input else None
        rotations = {kind: tuple(t.unsqueeze(2) for t in self.rope.cos_sin(kind, rows.positions)) for kind in LayerKind}
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        # Past the last layer that owns a cache nobody reads a place but the ones asked for, from its queries on.
        last_owner = max(layer for layer in range(a.num_hidden_layers) if a.owns_cache(layer))
        for layer in range(a.num_hidden_layers):
            h = self.norm(x, self.weights[f"layers.{layer}.input_layernorm.weight"], self.dtype)
            if a.owns_cache(layer):
                kept[layer] = self._keys_values(layer, h, rotations[a.kind(layer)])
            if layer == last_owner:
                x, h = _take(x, rows.predict), _take(h, rows.predict)
                per_layer = None if per_layer is None else _take(per_layer, rows.predict)
                rotations = {kind: tuple(_take(t, rows.predict) for t in rotations[kind]) for kind in LayerKind}
            attended = self._attend(
                layer, h, rotations[a.kind(layer)], kept[a.producer(layer)], rows, layer >= last_owner
            )
            post = self.weights[f"layers.{layer}.post_attention_layernorm.weight"]
            x = self.add_norm(x, self.linear(attended, f"layers.{layer}.self_attn.o_proj"), post)
            x = self.feed_forward(layer, x, None if per_layer is None else per_layer[:, :, layer])
            if outputs is not None and layer < last_owner:
                outputs[layer] = x
        if caches is not None:
            caches |= {kind: kept[a.owning_layers(kind)[-1]] for kind in LayerKind}
        return self.norm(x, self.weights["norm.weight"], self.dtype)

    def matrix(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.matrix(f"{name}.weight"))

    def _per_layer(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        a = self.architecture
        width = a.hidden_size_per_layer_input
        shape = (*input_ids.shape, a.num_hidden_layers, width)
        context = self.linear(embedded.to(self.dtype), "per_layer_model_projection") * a.hidden_size**-0.5
        context = self.norm(context.view(shape), self.weights["per_layer_projection_norm.weight"], torch.float32)
        table = functional.embedding(input_ids, self.weights["embed_tokens_per_layer.weight"]) * width**0.5
        return ((context + table.view(shape)) * 2.0**-0.5).to(self.dtype)

    def _keys_values(self, layer: int, h: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        a, name = self.architecture, f"layers.{layer}.self_attn"
        head_dim = a.layer_head_dim(layer)
        raw = self.linear(h, f"{name}.k_proj").unflatten(-1, (-1, head_dim))
        v = raw if a.k_from_v(layer) else self.linear(h, f"{name}.v_proj").unflatten(-1, (-1, head_dim))
        return self.norm_rotate(raw, self.weights[f"{name}.k_norm.weight"], *rotation), self._unit(v)

    def _attend(
        self,
        layer: int,
        h: Tensor,
        rotation: tuple[Tensor, ...],
        cache: tuple[Tensor, Tensor],
        rows: Rows,
        asked_only: bool,
    ) -> Tensor:
        """h [B, L, H], or [B, M, H] at the places asked for. Returns [B, L or M, heads * D]."""
        a, name = self.architecture, f"layers.{layer}.self_attn"
        q = self.linear(h, f"{name}.q_proj").unflatten(-1, (-1, a.layer_head_dim(layer)))
        q = self.norm_rotate(q, self.weights[f"{name}.q_norm.weight"], *rotation)
        keys, values = cache
        length = rows.input_ids.shape[1]
        at = torch.arange(length, device=h.device).expand_as(rows.input_ids).contiguous()
        sliding = a.kind(layer) is LayerKind.SLIDING
        if asked_only:
            asked = rows.documents.gather(1, rows.predict)
            window = a.sliding_window if sliding else length
            return self.product(q, keys, values, rows.predict, at, asked, rows.documents, window)
        if sliding:
            return self._sliding(q, keys, values, at, rows.documents)
        chunks = []
        for start in range(0, q.shape[1], QUERIES_PER_CHUNK):
            end = min(start + QUERIES_PER_CHUNK, q.shape[1])
            mine, seen, doc = slice(start, end), slice(0, end), rows.documents
            chunks.append(
                self.product(
                    q[:, mine],
                    keys[:, seen],
                    values[:, seen],
                    at[:, mine],
                    at[:, seen],
                    doc[:, mine],
                    doc[:, seen],
                    end,
                )
            )
        return torch.cat(chunks, dim=1)

    def _sliding(self, q: Tensor, keys: Tensor, values: Tensor, at: Tensor, documents: Tensor) -> Tensor:
        """Blocks of one window: a query sees keys of its own block and of the one before."""
        window = self.architecture.sliding_window
        batch, length = documents.shape
        assert length % window == 0, f"rows of {length} tokens are no multiple of the window {window}"

        def blocks(t: Tensor) -> Tensor:
            return t.unflatten(1, (-1, window)).flatten(0, 1)

        def with_previous(t: Tensor, empty: int) -> Tensor:
            cut = t.unflatten(1, (-1, window))
            before = torch.cat((torch.full_like(cut[:, :1], empty), cut[:, :-1]), dim=1)
            return torch.cat((before, cut), dim=2).flatten(0, 1)

        result = self.product(
            blocks(q), with_previous(keys, 0), with_previous(values, 0),
            blocks(at), with_previous(at, -1), blocks(documents), with_previous(documents, -2), window,
        )  # fmt: skip
        return result.unflatten(0, (batch, -1)).flatten(1, 2)

    def product(
        self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, key_at: Tensor, doc: Tensor, key_doc: Tensor, window: int
    ) -> Tensor:
        """q [N, Q, heads, D], k and v [N, K, KV heads, D]. Grouped queries are rows of one product per KV head."""
        kv_heads, width = k.shape[2:]
        groups = q.shape[2] // kv_heads
        # Rows ordered by place, then head: with one KV head nothing is copied.
        grouped = q.unflatten(2, (kv_heads, groups)).transpose(1, 2).reshape(q.shape[0], kv_heads, -1, width)
        scores = (grouped @ k.permute(0, 2, 3, 1)).unflatten(2, (-1, groups))
        weights = self._softmax(scores, at, key_at, doc, key_doc, window)
        out = weights.flatten(2, 3) @ v.transpose(1, 2)
        return out.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2)

    def feed_forward(self, layer: int, x: Tensor, per_layer: Tensor | None) -> Tensor:
        name = f"layers.{layer}"
        h = self.norm(x, self.weights[f"{name}.pre_feedforward_layernorm.weight"], self.dtype)
        fed = self._gelu(self.linear(h, f"{name}.mlp.gate_proj"), self.linear(h, f"{name}.mlp.up_proj"))
        post = self.weights[f"{name}.post_feedforward_layernorm.weight"]
        x = self.add_norm(x, self.linear(fed, f"{name}.mlp.down_proj"), post)
        if per_layer is not None:
            gated = self._gelu(self.linear(x.to(self.dtype), f"{name}.per_layer_input_gate"), per_layer)
            norm = self.weights[f"{name}.post_per_layer_input_norm.weight"]
            x = self.add_norm(x, self.linear(gated, f"{name}.per_layer_projection"), norm)
        return x * self.weights[f"{name}.layer_scalar"]


def _take(t: Tensor, places: Tensor) -> Tensor:
    """t [B, L, ...] at places [B, M]."""
    index = places.view(*places.shape, *[1] * (t.dim() - 2)).expand(-1, -1, *t.shape[2:])
    return t.gather(1, index)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the trained tokens, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
