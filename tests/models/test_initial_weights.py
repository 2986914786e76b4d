"""What the start of training is shaped for, seen in what a fresh layer does with random tokens."""

from __future__ import annotations

import pytest
import torch
from configs import config_json
from decoder import Decoder
from initial_weights import OUTPUT_LIKE_VALUE, POST_NORM, QUERY_LIKE_KEY, initial_weights
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture

CPU = torch.device("cpu")
TOKENS = 96


def fresh_decoder(model: str) -> Decoder:
    architecture = ModelArchitecture.from_config(config_json(model))
    weights = initial_weights(architecture, seed=3, device=CPU)
    return Decoder(architecture, {name: w.detach() for name, w in weights.items()}, dtype=torch.float32)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])


@pytest.mark.parametrize("layer", [0, 1])
def test_queries_of_the_first_key_head_look_one_and_two_places_back(layer: int) -> None:
    decoder = fresh_decoder("gemma4-tiny-keqv")
    ids = torch.randint(300, 2000, (1, TOKENS), generator=torch.Generator().manual_seed(layer))
    x = torch.nn.functional.embedding(ids, decoder.weights["embed_tokens.weight"]) * 128**0.5
    h = decoder.norm(x, torch.ones(128), torch.float32)
    cos, sin = (t.unsqueeze(2) for t in decoder.rope.cos_sin(LayerKind.SLIDING, torch.arange(TOKENS)[None]))
    name = f"layers.{layer}.self_attn"

    def heads(projection: str, norm: str) -> Tensor:
        of_heads = decoder.linear(h, f"{name}.{projection}").unflatten(-1, (-1, 256))
        return decoder.norm_rotate(of_heads, decoder.weights[f"{name}.{norm}.weight"], cos, sin)[0]

    q, k = heads("q_proj", "q_norm")[:, :3], heads("k_proj", "k_norm")[:, :2]
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for head, back in ((0, 1), (1, 2)):
        seen = (q[:, head] @ k[:, 0].T).masked_fill(~causal, -torch.inf).softmax(-1)
        assert (seen.diagonal(-back) > 0.5).all()
    other = (q[:, 2] @ k[:, 1].T).masked_fill(~causal, -torch.inf).softmax(-1)  # a head of its own: by content
    assert other.diagonal(-1)[10:].median() < 0.2


def test_queries_are_like_keys_and_outputs_like_values() -> None:
    decoder = fresh_decoder("gemma4-tiny-keqv")
    name = "layers.2.self_attn"  # the first global layer: its values are what keys are made of, one head for eight
    key = decoder.weights[f"{name}.k_proj.weight"].repeat(8, 1)
    assert correlation(decoder.weights[f"{name}.q_proj.weight"], key) == pytest.approx(QUERY_LIKE_KEY, abs=0.02)
    assert correlation(decoder.weights[f"{name}.o_proj.weight"], key.T) == pytest.approx(OUTPUT_LIKE_VALUE, abs=0.02)
    assert (decoder.weights["layers.4.post_feedforward_layernorm.weight"] == POST_NORM).all()


def test_with_per_layer_embeddings_only_queries_are_shaped() -> None:
    decoder = fresh_decoder("gemma4-tiny-ple")
    name = "layers.3.self_attn"
    key, value = (decoder.weights[f"{name}.{p}.weight"].unflatten(0, (-1, 512)) for p in ("k_proj", "v_proj"))
    groups = 8 // key.shape[0]
    key, value = (t.repeat_interleave(groups, dim=0).flatten(0, 1) for t in (key, value))
    assert correlation(decoder.weights[f"{name}.q_proj.weight"], key) == pytest.approx(QUERY_LIKE_KEY, abs=0.02)
    assert abs(correlation(decoder.weights[f"{name}.o_proj.weight"], value.T)) < 0.02
    assert (decoder.weights["layers.4.post_feedforward_layernorm.weight"] == 1).all()
