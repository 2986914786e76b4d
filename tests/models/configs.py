"""config.json of the checkpoints that are trained here: published structures at a size that a repository can hold."""

from __future__ import annotations

from typing import Any

from modelserve_tools.tiny.variants import EOS_TOKEN_IDS, SHARED_TEXT, layers, wrapped

VOCAB_SIZE = 2048

_TEXT: dict[str, Any] = SHARED_TEXT | {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 128,
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
        },
    ),
    "gemma4-tiny-ple": (
        "SSSFSSSF",
        {
            "hidden_size": 112,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 64,
        },
    ),
}

MODELS = tuple(_MODELS)
# The published variant whose chat template a model takes: 31B closes an empty thought when thinking is off, E4B not.
TEMPLATE_OF = {"gemma4-tiny-keqv": "31b", "gemma4-tiny-ple": "e4b"}


def config_json(model: str, **changes: Any) -> dict[str, Any]:
    """The multimodal wrapper's config.json without towers; `changes` go into text_config. KeyError for another name."""
    pattern, differences = _MODELS[model]
    return wrapped(_TEXT | layers(changes.pop("pattern", pattern)) | differences | changes)


GENERATION_CONFIG = {"bos_token_id": 2, "eos_token_id": EOS_TOKEN_IDS, "pad_token_id": 0, "do_sample": False}


def assistant_config_json() -> dict[str, Any]:
    """The MTP assistant of gemma4-tiny-keqv: queries only, four layers that read the target's last two caches."""
    text = _TEXT | layers("SSSF") | _MODELS["gemma4-tiny-keqv"][1]
    text |= {
        "intermediate_size": 256,
        "num_kv_shared_layers": 4,
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


def dflash_config_json() -> dict[str, Any]:
    """A DFlash drafter of gemma4-tiny-keqv in z-lab's spelling: a layer with a window, and one that sees everything."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": _TEXT["max_position_embeddings"],
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "dtype": "bfloat16",
        "block_size": 8,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2, 4]},
    }
