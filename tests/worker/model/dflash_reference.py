"""The arithmetic of the DFlash family, one block at a time, in float32, from a config.json and its file's tensors.

Written from the papers and the publishers' formats, and from nothing of the product's: it reads the config itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu


@dataclass(frozen=True)
class Block:
    """rows [B, H] after the final norm, tokens of the target's vocabulary, and how sure each is."""

    rows: Tensor
    tokens: list[int]
    confidence: list[float] | None


class Reference:
    """`embedding` and `head` [V, H] are the target's."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor):
        self.config, self.tensors, self.embedding, self.head = config, tensors, embedding, head
        self.kind = config.get("speculators_model_type", config["architectures"][0])
        self.gemma = self.kind == "Gemma4DSparkModel"
        self.zlab = self.kind == "DFlashDraftModel"
        layers = config.get("transformer_layer_config", config)
        self.layers, self.hidden = layers, layers["hidden_size"]
        self.head_dim = layers["global_head_dim"] if self.gemma else layers["head_dim"]
        rope = layers.get("rope_parameters", layers)
        self.theta = float((rope["full_attention"] if self.gemma else rope)["rope_theta"])
        self.turned = int(0.25 * self.head_dim // 2) if self.gemma else self.head_dim // 2
        self.types = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]

    def tapped(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Of the target's hidden states [N, H]: of the embedding, then behind each layer."""
        if "aux_hidden_state_layer_ids" in self.config:
            places = self.config["aux_hidden_state_layer_ids"]  # inputs of layers
        else:
            own = self.config.get("dflash_config", self.config)
            places = [layer + 1 for layer in own["target_layer_ids"]]  # outputs of layers
        return torch.cat([hidden_states[place] for place in places], dim=-1)

    def context(self, hidden_states: Sequence[Tensor]) -> Tensor:
        return self._norm(linear(self.tapped(hidden_states), self.tensors["fc.weight"]), "hidden_norm.weight")

    def block(self, hidden_states: Sequence[Tensor], anchor: int, position: int) -> Block:
        """hidden_states of the positions 0 .. position - 1."""
        size = self.config["block_size"]
        ids = torch.tensor([anchor] + [self._mask_id()] * (size - 1))
        table = self.tensors["embed_tokens.weight"] if self.gemma else self.embedding
        x = table[ids] * (self.hidden**0.5 if self.gemma or self.zlab else 1.0)
        c = self.context(hidden_states)
        for layer in range(self.layers["num_hidden_layers"]):
            x = self._layer(layer, x, c, position)
        y = self._norm(x, "norm.weight")
        tokens, confidence = self._tokens(y, anchor)
        return Block(y, tokens, confidence)

    def keys_values(self, layer: int, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}.self_attn."
        raw = linear(h, self.tensors[f"{name}k_proj.weight"]).unflatten(-1, (-1, self.head_dim))
        k = self._turn(self._norm(raw, f"{name}k_norm.weight"), positions)
        if self.gemma:
            return k, raw * (raw.pow(2).mean(-1, keepdim=True) + self.layers.get("rms_norm_eps", 1e-6)).rsqrt()
        return k, linear(h, self.tensors[f"{name}v_proj.weight"]).unflatten(-1, (-1, self.head_dim))

    def _layer(self, layer: int, x: Tensor, c: Tensor, position: int) -> Tensor:
        name, size = f"layers.{layer}.", len(x)
        h, kappa = self._convolved(f"{name}attention_conv", self._norm(x, f"{name}input_layernorm.weight"))
        here = torch.arange(position, position + size)
        q = linear(h, self.tensors[f"{name}self_attn.q_proj.weight"]).unflatten(-1, (-1, self.head_dim))
        q = self._turn(self._norm(q, f"{name}self_attn.q_norm.weight"), here)
        before = self.keys_values(layer, c, torch.arange(position))
        within = self.keys_values(layer, h, here)
        k, v = (torch.cat(pair) for pair in zip(before, within, strict=True))
        mixed = torch.zeros_like(q)
        for row in range(size):
            seen = self._seen(layer, row, position, size)
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = k[seen, shared] @ q[row, head] * (1.0 if self.gemma else self.head_dim**-0.5)
                mixed[row, head] = scores.softmax(0) @ v[seen, shared]
        out = linear(mixed.flatten(1), self.tensors[f"{name}self_attn.o_proj.weight"])
        out = self._behind(f"{name}attention_conv", out, kappa)
        if self.gemma:
            x = x + self._norm(out, f"{name}post_attention_layernorm.weight")
            h = self._norm(x, f"{name}pre_feedforward_layernorm.weight")
            x = x + self._norm(self._mlp(name, h), f"{name}post_feedforward_layernorm.weight")
            return x * self.tensors[f"{name}layer_scalar"]
        x = x + out
        h, kappa = self._convolved(f"{name}mlp_conv", self._norm(x, f"{name}post_attention_layernorm.weight"))
        return x + self._behind(f"{name}mlp_conv", self._mlp(name, h), kappa)

    def _seen(self, layer: int, row: int, position: int, size: int) -> list[int]:
        """Places of keys: those before the block, then the block's."""
        sliding = self.types[layer] == "sliding_attention"
        first = max(0, position - self.layers["sliding_window"]) if sliding else 0
        causal = sliding and not self.config.get("sliding_window_non_causal", False)
        return [*range(first, position), *range(position, position + (row + 1 if causal else size))]

    def _mlp(self, name: str, h: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        act = gelu(linear(h, gate), approximate="tanh") if self.gemma else silu(linear(h, gate))
        return linear(act * linear(h, up), down)

    def _convolved(self, name: str, h: Tensor) -> tuple[Tensor, Tensor | None]:
        if f"{name}.base_kernel" not in self.tensors:
            return h, None
        taps, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        kappa = linear(h, self.tensors[f"{name}.kernel_projection.weight"]).view(len(h), 2, taps, -1)
        kappa = kappa.repeat_interleave(group, dim=-1)  # by channel
        return self._summed(h, self.tensors[f"{name}.base_kernel"][0] + kappa[:, 0]), kappa[:, 1]

    def _behind(self, name: str, h: Tensor, kappa: Tensor | None) -> Tensor:
        return h if kappa is None else self._summed(h, self.tensors[f"{name}.base_kernel"][1] + kappa)

    def _summed(self, h: Tensor, kernel: Tensor) -> Tensor:
        return torch.stack(
            [sum(h[t - j] * kernel[t, j] for j in range(kernel.shape[1]) if t >= j) for t in range(len(h))]
        )

    def _tokens(self, y: Tensor, anchor: int) -> tuple[list[int], list[float] | None]:
        from_anchor = self.config.get("sample_from_anchor", self.gemma)
        y = y if from_anchor else y[1:]
        own = self.tensors.get("lm_head.weight")
        logits = linear(y, self.head if own is None else own)
        cap = self.layers.get("final_logit_softcapping")
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        d2t, tokens, sure, before = self.tensors.get("d2t"), [], [], anchor
        for row, scores in zip(y, logits, strict=True):
            if "markov_head.markov_w1.weight" in self.tensors:
                looked_up = self.tensors["markov_head.markov_w1.weight"][before]
                scores = scores + self.tensors["markov_head.markov_w2.weight"] @ looked_up
                features = torch.cat((row, looked_up))
                logit = features @ self.tensors["confidence_head.proj.weight"][0]
                sure.append(float((logit + self.tensors["confidence_head.proj.bias"][0]).sigmoid()))
            if "candidate_selector.hidden_projection.weight" in self.tensors:
                candidates = scores.topk(self.config["selector_top_k"]).indices
                query = self.tensors["candidate_selector.predecessor_codebook"][before]
                query = query * (self.tensors["candidate_selector.hidden_projection.weight"] @ row)
                added = self.tensors["candidate_selector.successor_codebook"][candidates] @ query
                scores = torch.full_like(scores, -torch.inf).scatter(0, candidates, scores[candidates] + added)
            best = int(scores.argmax())
            before = best if d2t is None else best + int(d2t[best])
            tokens.append(before)
        return tokens, sure or None

    def _mask_id(self) -> int:
        return int(self.config.get("dflash_config", self.config)["mask_token_id"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.layers.get("rms_norm_eps", 1e-6)
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[name]

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, D]: pair (i, i + D / 2) by position / theta^(2 i / D), the first `turned` pairs."""
        half = self.head_dim // 2
        speed = torch.tensor([self.theta ** (-2 * i / self.head_dim) if i < self.turned else 0.0 for i in range(half)])
        angle = (positions[:, None].float() * speed)[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )
