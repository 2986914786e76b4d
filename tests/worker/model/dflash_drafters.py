"""Small drafters of the DFlash family, in each spelling of config.json, and attention of theirs over dense tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.drafters.dflash import DFlashArchitecture

HIDDEN, VOCAB, TARGET_LAYERS, WINDOW = 64, 256, 6, 5
S, F = "sliding_attention", "full_attention"
TARGET: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": TARGET_LAYERS, "layer_types": [S, S, F, S, S, F], "num_attention_heads": 8, "head_dim": 16,
    "global_head_dim": 32, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "sliding_window": 9, "max_position_embeddings": 4096, "final_logit_softcapping": 30.0, "dtype": "float32",
}  # fmt: skip
_LAYERS: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
_SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "block_size": 6, "aux_hidden_state_layer_ids": [1, 3, 6],
    "mask_token_id": 4, "draft_vocab_size": 48, "tie_word_embeddings": False, "sliding_window_non_causal": False,
}  # fmt: skip
_PLAIN = _LAYERS | {"num_hidden_layers": 3, "head_dim": 32, "model_type": "llama"}
_PLAIN |= {"rope_parameters": {"rope_theta": 10_000, "rope_type": "default"}}
_WINDOWED = {"layer_types": [S, S, S], "sliding_window": WINDOW}
CONFIGS: dict[str, dict[str, Any]] = {
    "zlab": _LAYERS | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 3, "head_dim": 16,
        "layer_types": [S, S, F], "sliding_window": WINDOW, "num_target_layers": TARGET_LAYERS, "block_size": 8,
        "rope_theta": 1_000_000, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2, 4]},
    },
    "dflash": _SPECULATORS | {"speculators_model_type": "dflash", "transformer_layer_config": _PLAIN},
    "dspark": _SPECULATORS | {
        "speculators_model_type": "dspark", "transformer_layer_config": _PLAIN | _WINDOWED,
        "sample_from_anchor": False, "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash2": _SPECULATORS | {
        "speculators_model_type": "dflash2", "transformer_layer_config": _PLAIN | _WINDOWED, "draft_vocab_size": VOCAB,
        "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8,
        "selector_top_k": 5,
    },
    "deepspec": {name: value for name, value in TARGET.items() if name != "dtype"} | {
        "architectures": ["Gemma4DSparkModel"], "num_hidden_layers": 3, "layer_types": [F, F, F], "block_size": 4,
        "num_target_layers": TARGET_LAYERS, "target_layer_ids": [1, 3, 5], "mask_token_id": 4,
        "hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": False, "tie_word_embeddings": False,
        "rope_parameters": {
            F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            S: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "num_anchors": 16,
        "final_logit_softcapping": 3.0,  # low enough that scores feel it
    },
}  # fmt: skip
KINDS = tuple(CONFIGS)


def target_architecture() -> ModelArchitecture:
    return ModelArchitecture.from_config(TARGET)


def checkpoint_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published file, written from what publishers' files have, not from the product."""
    layers = config.get("transformer_layer_config", config)
    deepspec = config["architectures"] == ["Gemma4DSparkModel"]
    heads, hidden, inner = layers["num_attention_heads"], layers["hidden_size"], layers["intermediate_size"]
    head = layers["global_head_dim"] if deepspec else layers["head_dim"]
    kv_heads = layers["num_global_key_value_heads"] if deepspec else layers["num_key_value_heads"]
    taps = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    taps = taps or config["dflash_config"]["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    for layer in range(layers["num_hidden_layers"]):
        name = f"layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if deepspec:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            shapes[f"{name}layer_scalar"] = (1,)
        shapes |= {f"{name}{norm}.weight": (hidden,) for norm in norms}
        shapes |= {
            f"{name}self_attn.q_proj.weight": (heads * head, hidden),
            f"{name}self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, heads * head),
            f"{name}self_attn.q_norm.weight": (head,), f"{name}self_attn.k_norm.weight": (head,),
            f"{name}mlp.gate_proj.weight": (inner, hidden), f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
        if not deepspec:
            shapes[f"{name}self_attn.v_proj.weight"] = (kv_heads * head, hidden)
        if "conv_kernel_size" in config:
            taps_of, groups = config["conv_kernel_size"], hidden // config["conv_group_size"]
            for convolution in ("attention_conv", "mlp_conv"):
                shapes[f"{name}{convolution}.base_kernel"] = (2, taps_of, hidden)
                shapes[f"{name}{convolution}.kernel_projection.weight"] = (2 * taps_of * groups, hidden)
    vocab, own = layers["vocab_size"], layers["vocab_size"] if deepspec else config.get("draft_vocab_size")
    if deepspec:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if deepspec or (own is not None and own < vocab):
        shapes["lm_head.weight"] = (own, hidden)
    if rank := config.get("markov_rank"):
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (own, rank),
            "confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,),
        }  # fmt: skip
    if rank := config.get("selector_rank"):
        shapes |= {
            "candidate_selector.predecessor_codebook": (vocab, rank),
            "candidate_selector.successor_codebook": (vocab, rank),
            "candidate_selector.hidden_projection.weight": (rank, hidden),
        }
    return shapes


def random_tensors(config: dict[str, Any], *, seed: int) -> dict[str, Tensor]:
    """float32, of unit gain; heads that add to scores are strong enough to change tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in checkpoint_shapes(config).items()}
    vocab = config.get("transformer_layer_config", config)["vocab_size"]
    own = config.get("draft_vocab_size", vocab)
    if own < vocab:
        tokens = torch.randperm(vocab, generator=generator)[:own].sort().values
        tensors["d2t"] = tokens - torch.arange(own)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "markov" in name or "codebook" in name:
        return noise * (0.5 if "markov" in name else 1.0)
    if name.endswith("base_kernel"):
        return noise * 0.3
    if len(shape) > 1:
        return noise * shape[-1] ** -0.5
    if name.endswith("bias"):
        return noise
    scale = 1.3 if "self_attn" in name else 1.0  # of norms of queries and keys: attention is far from uniform
    return (1.0 + 0.2 * noise) * scale


def write_drafter(kind: str, directory: Path, *, seed: int, **changes: Any) -> dict[str, Any]:
    """config.json and model.safetensors of a random drafter; returns the config."""
    config = CONFIGS[kind] | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed=seed), directory / "model.safetensors", metadata={"format": "pt"})
    return config


class DenseDraftAttention:
    """Keys and values of each slot's positions 0, 1, ... are dense: `context` by layer, K and V [S, C, KV heads, D]."""

    def __init__(self, architecture: DFlashArchitecture, context: Sequence[tuple[Tensor, Tensor]], anchors: Tensor):
        self.architecture, self.context, self.anchors = architecture, context, anchors

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, block, heads = q.shape[:3]
        keys, values = (torch.cat(pair, dim=1) for pair in zip(self.context[layer], (k, v), strict=True))
        kept = self.context[layer][0].shape[1]
        at, row = torch.arange(kept), torch.arange(block)
        window = self.architecture.layer_windows[layer] or kept
        seen = (at < self.anchors[:, None]) & (at >= self.anchors[:, None] - window)  # [S, C]
        within = row[None, :] <= row[:, None] if self.architecture.causal[layer] else torch.ones(block, block) > 0
        mask = torch.cat((seen[:, None].expand(-1, block, -1), within.expand(slots, -1, -1)), dim=-1)
        groups = heads // keys.shape[2]
        keys, values = (each.repeat_interleave(groups, dim=2) for each in (keys, values))
        scores = torch.einsum("sbhd,schd->shbc", q.float(), keys.float()) * self.architecture.attention_scale
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        return torch.einsum("shbc,schd->sbhd", weights, values.float()).flatten(2).to(q.dtype)
