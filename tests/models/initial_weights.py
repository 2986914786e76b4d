"""Where training starts: random weights, shaped so that looking something up forms within hundreds of steps.

docs/decisions/0007 tells what was seen without. Nothing in the engine depends on any of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_tools.tiny.weights import tensor_shapes
from modelserve_worker.layers.rotary import inverse_frequencies

QUERY_LIKE_KEY = 0.5
"""Correlation of a query projection with its layer's key projection: a token attends a little to tokens like itself."""

OUTPUT_LIKE_VALUE = 0.5
"""Correlation of an output projection with its layer's value projection, transposed: what is attended to is copied."""

POST_NORM = 0.3
"""What a layer's attention and MLP add at first, as a share of a token's embedding."""

SAME_IN_ALL = 0.5
"""The part of every embedding, as a share of its length, that all tokens have in common."""


def fresh(shapes: Iterable[tuple[str, tuple[int, ...]]], *, seed: int) -> dict[str, Tensor]:
    """float32 by name. Matrices have variance 1 / fan-in; q_norm = k_norm = d^(-1/4): scores of scale 1; the rest 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes:
        if len(shape) > 1:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        else:
            of_head = name.endswith(("q_norm.weight", "k_norm.weight"))
            weights[name] = torch.full(shape, shape[0] ** -0.25 if of_head else 1.0)
    return weights


def initial_weights(architecture: ModelArchitecture, *, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Trainable, by checkpoint name.

    Queries resemble keys. Per-layer embeddings tell every layer which token it is at; a model without them gets more
    help: outputs that resemble values, a quiet start of its layers, and heads that look at the last places.
    """
    weights = fresh(tensor_shapes(architecture), seed=seed)
    for layer in range(architecture.num_hidden_layers):
        query = weights[f"layers.{layer}.self_attn.q_proj.weight"]
        key = weights[f"layers.{architecture.producer(layer)}.self_attn.k_proj.weight"]
        like_key = _for_each_query_head(architecture, layer, key)
        query.mul_((1 - QUERY_LIKE_KEY**2) ** 0.5).add_(like_key, alpha=QUERY_LIKE_KEY)
    if not architecture.hidden_size_per_layer_input:
        for layer in range(architecture.num_hidden_layers):
            _copy_what_is_attended(weights, architecture, layer)
        _look_at_the_last_places(weights, architecture)
    return {name: value.to(device).requires_grad_() for name, value in weights.items()}


def _for_each_query_head(architecture: ModelArchitecture, layer: int, of_kv_heads: Tensor) -> Tensor:
    """[KV heads * D, H] -> [query heads * D, H]."""
    heads = of_kv_heads.unflatten(0, (-1, architecture.layer_head_dim(layer)))
    return heads.repeat_interleave(architecture.num_attention_heads // heads.shape[0], dim=0).flatten(0, 1)


def _copy_what_is_attended(weights: dict[str, Tensor], architecture: ModelArchitecture, layer: int) -> None:
    name = f"layers.{layer}"
    values = "k_proj" if architecture.k_from_v(layer) else "v_proj"
    value = _for_each_query_head(architecture, layer, weights[f"{name}.self_attn.{values}.weight"])
    output = weights[f"{name}.self_attn.o_proj.weight"]
    like_value = value.T * (output.std() / value.std())
    output.mul_((1 - OUTPUT_LIKE_VALUE**2) ** 0.5).add_(like_value, alpha=OUTPUT_LIKE_VALUE)
    for post in ("post_attention_layernorm", "post_feedforward_layernorm"):
        weights[f"{name}.{post}.weight"].fill_(POST_NORM)


def _look_at_the_last_places(weights: dict[str, Tensor], architecture: ModelArchitecture) -> None:
    """In the sliding layers before the first global one, the first KV head's queries look 1, 2, ... places back.

    What all embeddings have in common makes one key k for every token, and for query head m the query R(-m) k, R(n)
    being the rotation by n places: their product is largest where the key is m places before the query. Only the
    fastest quarter of the pairs takes part, since slow ones do not tell neighbours apart.
    """
    embeddings = weights["embed_tokens.weight"]
    embeddings.mul_((1 - SAME_IN_ALL**2) ** 0.5)[:, 0] = SAME_IN_ALL  # rows have length 1, nearly
    head_dim, theta = architecture.head_dim, architecture.sliding_rope_theta
    half, pairs = head_dim // 2, head_dim // 8
    frequencies = inverse_frequencies(head_dim, theta=theta, rotated_pairs=half)[:pairs]
    for layer in range(architecture.num_hidden_layers):
        if architecture.kind(layer) is LayerKind.GLOBAL:
            break
        query = weights[f"layers.{layer}.self_attn.q_proj.weight"].unflatten(0, (-1, head_dim))
        key = weights[f"layers.{layer}.self_attn.k_proj.weight"].unflatten(0, (-1, head_dim))
        key[0].mul_(0.1)[:pairs, 0] = 1.0
        for back, head in enumerate(query[: len(query) // len(key)], start=1):
            head.mul_(0.1)[:pairs, 0] = torch.cos(back * frequencies)
            head[half : half + pairs, 0] = -torch.sin(back * frequencies)
