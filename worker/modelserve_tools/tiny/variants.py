"""The config.json of a small checkpoint for each published variant: same structure, small sizes."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 512
EOS_TOKEN_IDS = [1, 106, 50]  # <eos>, end of turn, start of a tool response: the list of the published -it models

SHARED_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "max_position_embeddings": 32768,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    },
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_bidirectional_attention": None,
    "dtype": "bfloat16",
    # Switched on by single variants below.
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}

_PER_LAYER = {"hidden_size_per_layer_input": 16}
_MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}

# Pattern (S sliding, F full) and the fields in which a variant differs.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "31b": ("SSSSSF", {"num_key_value_heads": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "26b-a4b": ("SSFSSF", {"num_key_value_heads": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 2} | _MOE),
    "12b": ("SSFSSF", {"num_key_value_heads": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "e4b": ("SSFSSFSSF", {"num_key_value_heads": 2, "num_kv_shared_layers": 3} | _PER_LAYER),
    "e2b": (
        "SSFSSFSSF",
        {"num_key_value_heads": 1, "num_kv_shared_layers": 3, "use_double_wide_mlp": True} | _PER_LAYER,
    ),
}

VARIANTS = tuple(_VARIANTS)
DENSE_THINKING_OFF_BLOCK = ("31b", "26b-a4b", "12b")  # their templates add an empty thought block (chat format)


def config_json(variant: str) -> dict[str, Any]:
    """The config.json of `variant`. KeyError for an unknown variant."""
    pattern, differences = _VARIANTS[variant]
    return wrapped(SHARED_TEXT | layers(pattern) | differences)


def layers(pattern: str) -> dict[str, Any]:
    """The fields of text_config that say the layers' kinds."""
    layer_types = ["full_attention" if letter == "F" else "sliding_attention" for letter in pattern]
    return {"num_hidden_layers": len(pattern), "layer_types": layer_types}


def wrapped(text: dict[str, Any]) -> dict[str, Any]:
    """The multimodal wrapper's config.json around a text_config, without towers."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "eos_token_id": EOS_TOKEN_IDS,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "vision_config": None,
        "audio_config": None,
        "text_config": text,
    }
