"""What a config.json says of a drafter of the DFlash family, in each of the spellings that are published.

z-lab's has Qwen3's keys at the top and `dflash_config`; a tap is named by the layer whose output it is, and rows of
the embedding are the target's, scaled as the target scales them unless `input_embedding_scale` says otherwise. That of
speculators (`dflash`, `dspark`, `dflash2`) has the layers' keys in `transformer_layer_config`; a tap is named by the
layer whose *input* it is, and the target's embedding is not scaled. DeepSpec's of Gemma 4 has that model's keys at the
top, layers of its global kind and z-lab's taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelserve.errors import UnsupportedModel
from modelserve.model.drafter_config import faults_of_a_config
from modelserve.model.drafters.dflash import MOST_LAYERS, DFlashArchitecture

ZLAB_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
DEEPSPEC_ARCHITECTURE = "Gemma4DSparkModel"
SPECULATORS_TYPES = ("dflash", "dspark", "dflash2")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of these."""
    named = _architectures(config)
    return config.get("speculators_model_type") in SPECULATORS_TYPES or (
        config.get("speculators_model_type") is None and bool(named & {*ZLAB_ARCHITECTURES, DEEPSPEC_ARCHITECTURE})
    )


def dflash_architecture(config: Mapping[str, Any]) -> DFlashArchitecture:
    """Read a parsed config.json that `is_dflash`. Raises UnsupportedModel for a setting that is not served and
    InvalidInput for a broken config."""
    if config.get("quantization_config"):
        raise UnsupportedModel("drafter: its weights are quantised; use the drafter in bfloat16")
    with faults_of_a_config():
        if config.get("speculators_model_type") in SPECULATORS_TYPES:
            fields = _speculators(config)
        elif DEEPSPEC_ARCHITECTURE in _architectures(config):
            fields = _deepspec(config)
        else:
            fields = _zlab(config)
        return DFlashArchitecture.model_validate(fields)


def _architectures(config: Mapping[str, Any]) -> set[str]:
    named = config.get("architectures")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list | tuple) else set()


def _zlab(config: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError("dflash_config must be a JSON object")

    def stated(name: str, default: Any = None) -> Any:
        return own.get(name, config.get(name, default))

    def required(name: str) -> Any:
        if (value := stated(name)) is None:
            raise KeyError(name)
        return value

    _serve("attention_sink_bias", own.get("attention_sink_bias", False), (False, None))
    _serve("use_aux_hidden_state", stated("use_aux_hidden_state", True), (True,))
    _serve("logit_scale", config.get("logit_scale"), (None, 1, 1.0))
    if not float(stated("output_multiplier", 1.0)) > 0.0:
        raise ValueError(f"output_multiplier {stated('output_multiplier')} turns the order of tokens")
    layers = _layers(config)
    types = _layer_types(config, layers["num_hidden_layers"])
    any_sliding, windowed = types is not None and _SLIDING in types, bool(own.get("use_swa", False))
    sliding = [windowed] * layers["num_hidden_layers"]
    if types is not None and not (windowed and not any_sliding):
        sliding = [kind == _SLIDING for kind in types]
    causal = next((value for value in (config.get("is_causal"), own.get("causal")) if value is not None), None)
    by_type = [kind == _SLIDING for kind in types or ()] or [False] * len(sliding)
    fields = layers | {
        "layer_windows": _windows(sliding, own.get("swa_window_size", config.get("sliding_window"))),
        "causal": tuple(by_type if causal is None else [bool(causal)] * len(sliding)),
        "taps": tuple(_numbers(required("target_layer_ids"), "target_layer_ids")),
        "num_target_layers": config.get("num_target_layers"),
        "block_rows": required("block_size"),
        "mask_token_id": required("mask_token_id"),
        "embedding_scale": stated("input_embedding_scale", layers["hidden_size"] ** 0.5),
        "draft_vocab_size": _draft_vocabulary(config, layers["vocab_size"]),
    }
    if "DFlash2DraftModel" in _architectures(config):
        fields |= {name: required(name) for name in _DFLASH2}
        fields["embedding_scale"] = stated("input_embedding_scale", 1.0)
    return fields


_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, inner = config["speculators_model_type"], config["transformer_layer_config"]
    if not isinstance(inner, Mapping):
        raise ValueError("transformer_layer_config must be a JSON object")
    _serve("transformer_layer_config.model_type", inner.get("model_type"), (None, "qwen3", "llama"))
    layers = _layers(inner)
    if config.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise ValueError(
            f"target_hidden_size {config['target_hidden_size']} is not hidden_size {layers['hidden_size']}; drafters "
            "as wide as their target are served"
        )
    inputs = _numbers(config["aux_hidden_state_layer_ids"], "aux_hidden_state_layer_ids")
    if 0 in inputs:
        raise UnsupportedModel(
            "drafter: config.json: aux_hidden_state_layer_ids names 0, the embedding; outputs of layers are read, from "
            "1 on"
        )
    types = _layer_types(inner, layers["num_hidden_layers"]) or [_FULL] * layers["num_hidden_layers"]
    sliding = [each == _SLIDING for each in types]
    free = bool(config.get("sliding_window_non_causal", False))
    fields = layers | {
        "layer_windows": _windows(sliding, inner.get("sliding_window")),
        "causal": tuple(each and not free for each in sliding),
        "taps": tuple(layer - 1 for layer in inputs),
        "block_rows": config["block_size"],
        "sample_from_anchor": bool(config.get("sample_from_anchor", kind == "dspark")),
        "mask_token_id": config["mask_token_id"],
        "embedding_scale": 1.0,
        "draft_vocab_size": _draft_vocabulary(config, layers["vocab_size"]),
    }
    if kind == "dspark":
        fields |= _markov(config, confidence=bool(config.get("enable_confidence_head", True)))
    elif kind == "dflash2":
        fields |= {name: config[name] for name in _DFLASH2}
    return fields


def _deepspec(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, k_eq_v = _count(config), bool(config.get("attention_k_eq_v"))
    types = _layer_types(config, layers)
    wide = bool(config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers"))
    for name, value, served in (
        ("layer_types", sorted(set(types or [_FULL])), ([_FULL],)),
        ("hidden_activation", config.get("hidden_activation", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",)),
        ("enable_moe_block", bool(config.get("enable_moe_block")), (False,)),
        ("hidden_size_per_layer_input", config.get("hidden_size_per_layer_input") or 0, (0,)),
        ("use_double_wide_mlp", wide, (False,)),
    ):
        _serve(name, value, served)
    _refuse_biases(config)
    rope = config.get("rope_parameters") or {}
    rope = rope.get(_FULL) or rope
    _serve("rope_type", rope.get("rope_type", "proportional"), ("proportional", "default"))
    _serve("rope factor", rope.get("factor", 1.0), (1, 1.0))
    proportional = rope.get("rope_type", "proportional") == "proportional"
    turned = float(rope.get("partial_rotary_factor", 0.25 if proportional else 1.0))
    head, hidden = config["global_head_dim"], config["hidden_size"]
    heads = config.get("num_global_key_value_heads") if k_eq_v else None
    fields = {name: config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    fields |= {
        "stack": "gemma4",
        "num_hidden_layers": layers,
        "num_key_value_heads": heads or config["num_key_value_heads"],
        "head_dim": head,
        "attention_scale": 1.0,
        "k_eq_v": k_eq_v,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": rope["rope_theta"],
        "rotary_pairs": int(turned * head // 2),
        "layer_windows": (None,) * layers,
        "causal": (False,) * layers,
        "taps": tuple(_numbers(config["target_layer_ids"], "target_layer_ids")),
        "num_target_layers": config.get("num_target_layers"),
        "block_rows": config["block_size"],
        "sample_from_anchor": True,
        "mask_token_id": config["mask_token_id"],
        "embedding_scale": hidden**0.5,
        "own_embedding": True,
        "draft_vocab_size": config["vocab_size"],
        "softcap": config.get("final_logit_softcapping"),
    }
    return fields | _markov(config, confidence=bool(config.get("enable_confidence_head", False)), rank=0)


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of Qwen3's layers: two norms, and norms of queries and keys by head."""
    _refuse_biases(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    activation = config.get("hidden_act", "silu")
    _serve("hidden_act", activation, _ACTIVATIONS)
    _serve("is_neox_style", config.get("is_neox_style", True), (True,))
    _serve("rope_scaling", config.get("rope_scaling"), (None,))
    rope = config.get("rope_parameters") or {}
    rope = rope.get(_SLIDING) or rope
    _serve("rope_type", rope.get("rope_type", "default"), ("default",))
    _serve("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1, 1.0))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    return {
        "stack": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": _count(config),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head,
        "attention_scale": head**-0.5,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "hidden_act": activation,
        "rope_theta": theta,
        "rotary_pairs": head // 2,
    }


def _markov(config: Mapping[str, Any], *, confidence: bool, rank: int = 256) -> dict[str, Any]:
    """DSpark's two heads; `rank`: of the first, where the config does not say."""
    rank = config.get("markov_rank", rank)
    if rank:
        _serve("markov_head_type", config.get("markov_head_type", "vanilla"), ("vanilla",))
    return {
        "markov_rank": rank,
        "has_confidence_head": confidence,
        "confidence_with_markov": confidence and bool(config.get("confidence_head_with_markov", True)),
    }


def _refuse_biases(config: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias", "fc_norm"):
        _serve(name, config.get(name) or False, (False,))


def _serve(name: str, value: Any, served: Sequence[Any]) -> None:
    if value not in served:
        raise UnsupportedModel(
            f"drafter: config.json: {name} {value!r} is not supported; this release serves "
            f"{' and '.join('none' if each is None else str(each) for each in served)}"
        )


def _count(config: Mapping[str, Any]) -> int:
    layers = config["num_hidden_layers"]
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {layers!r} is not one of 1 to {MOST_LAYERS}")
    return layers


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple) or len(types) != layers or not set(types) <= {_SLIDING, _FULL}:
        raise ValueError(f"layer_types must list {layers} layers, each {_SLIDING} or {_FULL}")
    return list(types)


def _windows(sliding: Sequence[bool], window: Any) -> tuple[int | None, ...]:
    if any(sliding) and (type(window) is not int or window < 1):
        raise ValueError(f"sliding layers need a sliding_window of 1 or more, not {window!r}")
    return tuple(window if each else None for each in sliding)


def _draft_vocabulary(config: Mapping[str, Any], vocabulary: int) -> int | None:
    """Rows of a head of its own: one for all tokens is the target's, which such files may repeat."""
    stated = config.get("draft_vocab_size")
    return None if stated in (None, vocabulary) else stated


def _numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list | tuple) or not value or any(type(each) is not int for each in value):
        raise ValueError(f"{name} must list layers of the target, not {value!r}")
    if len(set(value)) != len(value):
        raise ValueError(f"{name} {list(value)} names a layer twice")
    return list(value)
