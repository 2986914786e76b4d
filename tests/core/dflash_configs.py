"""config.json of published drafters of the DFlash family, as far as it is known, and what their files hold."""

from __future__ import annotations

import copy
from typing import Any

from architecture_of import architecture_of

from modelserve.model.architecture import LayerKind

S, F = "sliding_attention", "full_attention"
ZLAB_31B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 5376, "intermediate_size": 10752,
    "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "layer_types": [S, S, S, S, F], "sliding_window": 2048, "rope_theta": 1_000_000, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "vocab_size": 262144, "tie_word_embeddings": True, "block_size": 16,
    "final_logit_softcapping": 30.0, "num_target_layers": 60, "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
}  # fmt: skip
_REDHAT_LAYERS: dict[str, Any] = {
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 5376, "intermediate_size": 21504,
    "max_position_embeddings": 262144, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    "vocab_size": 262144,
}  # fmt: skip
DFLASH_31B: dict[str, Any] = {
    "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": 8,
    "draft_vocab_size": 32000, "mask_token_id": 4, "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
    "tie_word_embeddings": False, "transformer_layer_config": _REDHAT_LAYERS,
}  # fmt: skip
DSPARK_31B: dict[str, Any] = DFLASH_31B | {
    "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "sample_from_anchor": False,
    "markov_rank": 256, "markov_head_type": "vanilla",
    "transformer_layer_config": _REDHAT_LAYERS | {"layer_types": [S] * 5, "sliding_window": 2048},
}  # fmt: skip
DFLASH2_31B: dict[str, Any] = DFLASH_31B | {
    "speculators_model_type": "dflash2", "architectures": ["DFlash2Speculator"], "draft_vocab_size": 262144,
    "aux_hidden_state_layer_ids": [1, 17, 29, 47, 59], "sliding_window_non_causal": True, "conv_kernel_size": 2,
    "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    "transformer_layer_config": _REDHAT_LAYERS | {"layer_types": [S] * 5, "sliding_window": 2048},
}  # fmt: skip


def deepspec_12b() -> dict[str, Any]:
    """DeepSpec copies the target's text config and adds to it."""
    target = architecture_of("12B")
    config = {name: getattr(target, name) for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_global_key_value_heads", "global_head_dim", "attention_k_eq_v", "num_kv_shared_layers", "sliding_window",
        "max_position_embeddings", "vocab_size", "rms_norm_eps", "final_logit_softcapping", "use_double_wide_mlp",
    )}  # fmt: skip
    return config | {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "num_hidden_layers": 5,
        "layer_types": [LayerKind.GLOBAL.value] * 5, "num_target_layers": 48, "block_size": 7, "mask_token_id": 4,
        "target_layer_ids": [5, 17, 29, 41, 46], "markov_rank": 256, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "tie_word_embeddings": False,
        "enable_moe_block": False, "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            S: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }  # fmt: skip


def published_configs() -> dict[str, tuple[dict[str, Any], str]]:
    """Each with the variant that it drafts for."""
    return copy.deepcopy({
        "z-lab 31B": (ZLAB_31B, "31B"), "RedHat dflash 31B": (DFLASH_31B, "31B"),
        "RedHat dspark 31B": (DSPARK_31B, "31B"), "RedHat dflash2 31B": (DFLASH2_31B, "31B"),
        "DeepSpec 12B": (deepspec_12b(), "12B"),
    })  # fmt: skip
