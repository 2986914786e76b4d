"""The MTP assistant of gemma4-tiny-keqv: a drafter with queries only, which reads the target's caches.

Given the target's hidden state at place p (after the final norm) and the token that the target chose for p + 1, it says
the token at p + 2; fed its own state and that token, the one at p + 3, and so on. All steps read the target's last
sliding and last global cache up to place p, from one constant position.

The public implementations disagree on that position: one rotates the query by p, another by p + 1. Training draws
either for each batch, so that the drafter serves both. A sliding layer sees the window's rows up to p, those that the
target itself may see at p and a cache therefore still has; transformers 5.23 lets it see one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from configs import assistant_config_json
from decoder import IGNORED, Decoder, Rows
from initial_weights import fresh
from torch import Tensor
from torch.nn import functional

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_tools.tiny.weights import tensor_shapes

DRAFTS = 4  # tokens drafted from one place in training
_ATTENTION = ("input_layernorm", "self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", "post_attention_layernorm")


def assistant_architecture() -> ModelArchitecture:
    """Its layers as if they owned caches; they read the target's instead."""
    config = assistant_config_json()
    vocab = config["text_config"]["vocab_size"]
    text = config["text_config"] | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": vocab}
    return ModelArchitecture.from_config({"model_type": "gemma4", "text_config": text})


def initial_assistant(target: Decoder, *, seed: int) -> dict[str, Tensor]:
    """float32, trainable, by checkpoint name ("model." left out), on the target's device.

    Embeddings, final norm and everything about attention are those of the target's layers whose caches are read, and
    the projections pass the target's state through; only the MLPs are random.
    """
    architecture, trained = assistant_architecture(), target.weights
    read_from_target = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    shapes = [(name, shape) for name, shape in tensor_shapes(architecture) if not name.endswith(read_from_target)]
    hidden, backbone = architecture.hidden_size, target.architecture.hidden_size
    shapes += [("pre_projection.weight", (hidden, 2 * backbone)), ("post_projection.weight", (backbone, hidden))]
    weights = fresh(shapes, seed=seed)
    weights["pre_projection.weight"] = 0.5 * torch.eye(hidden, backbone).repeat(1, 2)
    weights["post_projection.weight"] = torch.eye(backbone, hidden)
    for name in ("embed_tokens.weight", "norm.weight"):
        weights[name] = trained[name]
    last = {target.architecture.kind(layer): layer for layer in range(target.architecture.num_hidden_layers)}
    for layer in range(architecture.num_hidden_layers):
        read = last[architecture.kind(layer)]
        for part in _ATTENTION:
            weights[f"layers.{layer}.{part}.weight"] = trained[f"layers.{read}.{part}.weight"]
    device = trained["norm.weight"].device
    return {name: value.detach().clone().to(device).requires_grad_() for name, value in weights.items()}


@dataclass(frozen=True)
class Target:
    """What the target computed for a batch: hidden [B, M, H] at `rows.predict`, and K, V [B, L, heads, D] by kind."""

    hidden: Tensor
    caches: Mapping[LayerKind, tuple[Tensor, Tensor]]

    @classmethod
    @torch.no_grad()
    def of(cls, decoder: Decoder, rows: Rows) -> Target:
        caches: dict[LayerKind, tuple[Tensor, Tensor]] = {}
        hidden = decoder.hidden(rows, caches=caches)
        return cls(hidden, caches)


class Assistant:
    """`target` lends its embedding table and the way it computes; weights are the assistant's own."""

    def __init__(self, weights: Mapping[str, Tensor], target: Decoder, *, compiled: bool = False) -> None:
        self.weights = weights
        self.target = target
        self._own = Decoder(assistant_architecture(), weights, dtype=target.dtype, compiled=compiled)
        self.window = self._own.architecture.sliding_window

    def drafts(self, rows: Rows, of: Target, tokens: Tensor, *, ahead: int) -> Tensor:
        """Logits float32 [B, M, K, vocab] of the tokens at p + 2 .. p + K + 1, for p in `rows.predict`.

        `tokens` int64 [B, M, K] are those at p + 1 .. p + K (known in training, drafted one by one in use); `ahead` is
        the constant position's distance from p, 0 or 1.
        """
        own, table = self._own, self.target.weights["embed_tokens.weight"]
        scale = self.target.architecture.hidden_size**0.5
        positions = rows.positions.gather(1, rows.predict) + ahead
        rotations = {
            kind: tuple(t.unsqueeze(2) for t in self.target.rope.cos_sin(kind, positions)) for kind in LayerKind
        }
        state, logits = of.hidden, []
        for step in range(tokens.shape[-1]):
            embedded = functional.embedding(tokens[..., step], table) * scale
            x = own.linear(torch.cat((embedded.to(own.dtype), state.to(own.dtype)), dim=-1), "pre_projection").float()
            for layer in range(own.architecture.num_hidden_layers):
                x = self._layer(layer, x, rows, of, rotations)
            normed = own.norm(x, self.weights["norm.weight"], own.dtype)
            logits.append(functional.linear(normed, own.matrix("embed_tokens.weight")).float())
            state = own.linear(normed, "post_projection")
        return torch.stack(logits, dim=2)

    def _layer(
        self, layer: int, x: Tensor, rows: Rows, of: Target, rotations: Mapping[LayerKind, tuple[Tensor, ...]]
    ) -> Tensor:
        own, name = self._own, f"layers.{layer}"
        kind = own.architecture.kind(layer)
        h = own.norm(x, self.weights[f"{name}.input_layernorm.weight"], own.dtype)
        q = own.linear(h, f"{name}.self_attn.q_proj").unflatten(-1, (-1, own.architecture.layer_head_dim(layer)))
        q = own.norm_rotate(q, self.weights[f"{name}.self_attn.q_norm.weight"], *rotations[kind])
        at = torch.arange(rows.input_ids.shape[1], device=x.device).expand_as(rows.input_ids)
        keys, values = of.caches[kind]
        window = self.window if kind is LayerKind.SLIDING else at.shape[1]
        asked = rows.documents.gather(1, rows.predict)
        attended = own.product(q, keys, values, rows.predict, at, asked, rows.documents, window)
        post = self.weights[f"{name}.post_attention_layernorm.weight"]
        x = own.add_norm(x, own.linear(attended, f"{name}.self_attn.o_proj"), post)
        return own.feed_forward(layer, x, None)


def following(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """Tokens [B, M, count] at p + 1 .. p + count, and labels [B, M, count] at p + 2 .. (-100 outside the answers)."""
    batch, length = rows.input_ids.shape
    answer = torch.full((batch, length + count + 2), IGNORED, device=rows.input_ids.device)
    trained = rows.labels >= 0
    places = torch.where(trained, rows.predict + 1, length + count + 1)
    answer.scatter_(1, places, rows.labels)
    answer[:, -1] = IGNORED
    steps = torch.arange(1, count + 1, device=answer.device)
    ahead = (rows.predict[..., None] + steps).clamp(max=length - 1)
    tokens = rows.input_ids.gather(1, ahead.flatten(1)).view_as(ahead)
    labels = answer.gather(1, (rows.predict[..., None] + steps + 1).flatten(1)).view_as(ahead)
    # Past the first place outside the answer nothing is drafted; a label there belongs to another answer.
    labels = torch.where((labels >= 0).cumprod(-1).bool() & trained[..., None], labels, IGNORED)
    return tokens, labels


@torch.no_grad()
def accepted(assistant: Assistant, rows: Rows, *, count: int, ahead: int) -> tuple[Tensor, Tensor]:
    """Greedy drafts judged: (accepted, possible), int64 [count], summed over the places of `rows`.

    The draft at step k counts as accepted when it and all before it are the tokens of the answer.
    """
    of = Target.of(assistant.target, rows)
    _, labels = following(rows, count)
    first = rows.labels.clamp(min=0)[..., None]
    tokens = first
    for _ in range(count - 1):
        logits = assistant.drafts(rows, of, tokens, ahead=ahead)
        tokens = torch.cat((first, logits.argmax(-1)), dim=-1)
    drafted = assistant.drafts(rows, of, tokens, ahead=ahead).argmax(-1)
    right = ((drafted == labels) & (labels >= 0)).cumprod(-1)
    return right.sum((0, 1)), (labels >= 0).sum((0, 1))
