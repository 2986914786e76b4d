"""The DFlash drafter of gemma4-tiny-keqv, differentiable, for training: a block of tokens from each of some anchors.

Context is the target's hidden states behind some of its layers, of the tokens before the anchor and of its document.
Row j of a block says the token at the anchor's position + j; the anchor's own row says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from configs import dflash_config_json
from decoder import IGNORED, Decoder, Rows
from initial_weights import fresh
from torch import Tensor
from torch.nn import functional

from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import drafter_architecture
from modelserve_worker.layers.rotary import inverse_frequencies, rotate

FADE = 4.0  # places behind which a draft's loss counts 1 / e


def dflash_geometry() -> DFlashArchitecture:
    drafter = drafter_architecture(dflash_config_json())
    assert isinstance(drafter, DFlashArchitecture)
    return drafter


def tensor_shapes(drafter: DFlashArchitecture) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint without an embedding and a head."""
    hidden, head, inner = drafter.hidden_size, drafter.head_dim, drafter.intermediate_size
    query, kv = drafter.num_attention_heads * head, drafter.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(drafter.taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(drafter.num_hidden_layers):
        of_layer = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def initial_dflash(target: Decoder, *, seed: int) -> dict[str, Tensor]:
    """float32, trainable, by checkpoint name, on the target's device. Context begins as what the last tap is, halves of
    layers as nothing, and the final norm as the target's."""
    drafter = dflash_geometry()
    weights = fresh(list(tensor_shapes(drafter).items()), seed=seed)
    hidden = drafter.hidden_size
    weights["fc.weight"] = torch.cat(
        (0.02 * torch.randn(hidden, hidden * (len(drafter.taps) - 1)), torch.eye(hidden)), dim=1
    )
    weights["norm.weight"] = target.weights["norm.weight"]
    for name in weights:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = torch.ones_like(weights[name])
    device = target.weights["norm.weight"].device
    return {name: value.detach().clone().to(device).requires_grad_() for name, value in weights.items()}


@dataclass(frozen=True)
class Context:
    """Of B rows of L tokens: what the target computed, float32 [B, L, taps * H], with its positions and documents."""

    tapped: Tensor
    rows: Rows

    @classmethod
    @torch.no_grad()
    def of(cls, target: Decoder, rows: Rows, taps: tuple[int, ...]) -> Context:
        outputs: dict[int, Tensor] = {}
        target.hidden(rows, outputs=outputs)
        return cls(torch.cat([outputs[tap].float() for tap in taps], dim=-1), rows)


class DFlashModel:
    """`table` [V, H] is the target's embedding and head."""

    def __init__(self, weights: Mapping[str, Tensor], table: Tensor) -> None:
        self.weights, self.table, self.drafter = weights, table, dflash_geometry()
        drafter = self.drafter
        self._frequencies = inverse_frequencies(
            drafter.head_dim, theta=drafter.rope_theta, rotated_pairs=drafter.rotary_pairs
        ).to(table.device)

    def logits(self, context: Context, anchors: Tensor) -> Tensor:
        """float32 [B, N, block - 1, V] of the tokens behind each of `anchors` int64 [B, N], places in the rows."""
        drafter, rows = self.drafter, context.rows
        block, (batch, count) = drafter.block_rows, anchors.shape
        ids = torch.full((batch, count, block), drafter.mask_token_id, device=anchors.device)
        ids[..., 0] = rows.input_ids.gather(1, anchors)
        x = functional.embedding(ids, self.table) * drafter.embedding_scale
        c = self._norm(functional.linear(context.tapped, self.weights["fc.weight"]), "hidden_norm")
        here = rows.positions.gather(1, anchors)[..., None] + torch.arange(block, device=anchors.device)
        for layer in range(drafter.num_hidden_layers):
            x = self._layer(layer, x, c, rows, anchors, here)
        return functional.linear(self._norm(x, "norm")[:, :, 1:], self.table)

    def _layer(self, layer: int, x: Tensor, c: Tensor, rows: Rows, anchors: Tensor, here: Tensor) -> Tensor:
        drafter, name = self.drafter, f"layers.{layer}"
        block, (batch, count) = drafter.block_rows, anchors.shape
        h = self._norm(x, f"{name}.input_layernorm")
        q = self._turned(self._heads(h, f"{name}.self_attn.q_proj"), f"{name}.self_attn.q_norm", here)
        within = self._keys_values(name, h, here)
        before = self._keys_values(name, c, rows.positions)
        groups = drafter.num_attention_heads // drafter.num_key_value_heads
        # [B, N, block, heads, keys]: of the row's tokens, then of the block's
        q = q.unflatten(-2, (-1, groups)) * drafter.attention_scale
        scores = torch.cat(
            (
                torch.einsum("bnqkgd,blkd->bnqkgl", q, before[0]),
                torch.einsum("bnqkgd,bnpkd->bnqkgp", q, within[0]),
            ),
            dim=-1,
        )
        at, window = torch.arange(rows.input_ids.shape[1], device=x.device), drafter.layer_windows[layer]
        distance = anchors[..., None] - at
        same = rows.documents.gather(1, anchors)[..., None] == rows.documents[:, None]
        seen = same & (distance > 0) & (distance <= (window or len(at)))  # [B, N, L]
        order = torch.arange(block, device=x.device)
        mine = order <= order[:, None] if drafter.causal[layer] else torch.ones_like(order <= order[:, None])
        mask = torch.cat((seen[:, :, None].expand(-1, -1, block, -1), mine.expand(batch, count, -1, -1)), dim=-1)[
            :, :, :, None, None
        ]
        share = scores.masked_fill(~mask, -1e30).softmax(-1).split((len(at), block), dim=-1)
        mixed = torch.einsum("bnqkgl,blkd->bnqkgd", share[0], before[1])
        mixed = mixed + torch.einsum("bnqkgp,bnpkd->bnqkgd", share[1], within[1])
        x = x + functional.linear(mixed.flatten(3), self.weights[f"{name}.self_attn.o_proj.weight"])
        h = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)

    def _keys_values(self, name: str, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._turned(self._heads(h, f"{name}.self_attn.k_proj"), f"{name}.self_attn.k_norm", positions)
        return keys, self._heads(h, f"{name}.self_attn.v_proj")

    def _heads(self, h: Tensor, name: str) -> Tensor:
        return functional.linear(h, self.weights[f"{name}.weight"]).unflatten(-1, (-1, self.drafter.head_dim))

    def _turned(self, x: Tensor, norm: str, positions: Tensor) -> Tensor:
        angles = positions.float().flatten()[:, None] * self._frequencies
        flat = self._norm(x, norm).flatten(0, -3)
        return rotate(flat, angles.cos(), angles.sin()).view(x.shape)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.drafter.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]


def labels_of(rows: Rows, anchors: Tensor, count: int) -> Tensor:
    """int64 [B, N, count]: the tokens behind each anchor, IGNORED from the first that is no part of its answer."""
    length = rows.input_ids.shape[1]
    answer = torch.full((len(anchors), length + count), IGNORED, device=anchors.device)
    places = torch.where(rows.labels >= 0, rows.predict + 1, length + count - 1)
    answer.scatter_(1, places, rows.labels)
    answer[:, length:] = IGNORED
    behind = anchors[..., None] + torch.arange(1, count + 1, device=anchors.device)
    found = answer.gather(1, behind.flatten(1)).view(*anchors.shape, count)
    return torch.where((found >= 0).cumprod(-1).bool(), found, IGNORED)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats, by place: a draft counts only where those before it are right."""
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / FADE).expand_as(labels)[labels >= 0]
    losses = functional.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def accepted(model: DFlashModel, context: Context, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """(accepted, possible), int64 [block - 1]: a draft counts when it and all before it are the answer's tokens."""
    logits = model.logits(context, anchors)
    labels = labels_of(context.rows, anchors, logits.shape[2])
    right = ((logits.argmax(-1) == labels) & (labels >= 0)).cumprod(-1)
    return right.sum((0, 1)), (labels >= 0).sum((0, 1))
