"""config.json of the checkpoints that are trained here: published structures at a size that a repository can hold."""

from __future__ import annotations

from typing import Any

from modelserve.architecture import LayerKind
from modelserve_worker.tiny.variants import EOS_TOKEN_IDS

VOCAB_SIZE = 2048
MAX_POSITION_EMBEDDINGS = 32_768

_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 128,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
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
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "dtype": "bfloat16",
}

# Pattern (S sliding, F full) and what differs. The PLE model is narrower, so that its table still fits into 16 MB.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-tiny-keqv": (
        "SSFSSF",
        {
            "hidden_size": 128,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4-tiny-ple": (
        "SSSFSSSF",
        {
            "hidden_size": 112,
            "num_key_value_heads": 2,
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
}

MODELS = tuple(_MODELS)
# The published variant whose chat template a model takes: 31B closes an empty thought when thinking is off, E4B not.
TEMPLATE_OF = {"gemma4-tiny-keqv": "31b", "gemma4-tiny-ple": "e4b"}


def _layer_types(pattern: str) -> list[str]:
    return [LayerKind.GLOBAL.value if letter == "F" else LayerKind.SLIDING.value for letter in pattern]


def config_json(model: str, **changes: Any) -> dict[str, Any]:
    """The multimodal wrapper's config.json without towers; `changes` go into text_config. KeyError for another name."""
    pattern, differences = _MODELS[model]
    pattern = changes.pop("pattern", pattern)
    layers = {"num_hidden_layers": len(pattern), "layer_types": _layer_types(pattern)}
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
        "text_config": _TEXT | layers | differences | changes,
    }


GENERATION_CONFIG = {"bos_token_id": 2, "eos_token_id": EOS_TOKEN_IDS, "pad_token_id": 0, "do_sample": False}


def assistant_config_json() -> dict[str, Any]:
    """The MTP assistant of gemma4-tiny-keqv: queries only, four layers that read the target's last two caches."""
    text = {name: value for name, value in _TEXT.items() if name != "final_logit_softcapping"}
    text |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": _layer_types("SSSF"),
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 128,
        "use_ordered_embeddings": False,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "eos_token_id": EOS_TOKEN_IDS,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "text_config": text,
    }
