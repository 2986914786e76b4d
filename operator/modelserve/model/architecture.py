"""The geometry of a Gemma 4 text model, read from a Hugging Face `config.json`.

Nothing here is specific to one published size: a small config of the same architecture is read the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from modelserve.errors import InvalidInput, UnsupportedModel, first_fault

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")

EXPERT_WIDTH_MULTIPLE = 8  # grouped matrix products need rows of a multiple of 16 bytes: 8 bfloat16 elements
MAX_PARAMETERS = 1 << 46  # byte counts of a larger model would not fit the resource's integers


class LayerKind(StrEnum):
    """Attention kind of a layer; the values are those of `layer_types` in config.json."""

    SLIDING = "sliding_attention"
    GLOBAL = "full_attention"


class ModelArchitecture(BaseModel):
    """Text-model geometry. Sizes are element counts, not bytes; heads count the whole model, not one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_hidden_layers: int = Field(ge=1, le=1024)
    full_attention_layers: tuple[int, ...]
    hidden_size: int = Field(ge=1, le=1 << 18)
    intermediate_size: int = Field(ge=1, le=1 << 20)
    use_double_wide_mlp: bool = False
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    num_key_value_heads: int = Field(ge=1, le=1 << 12)
    num_global_key_value_heads: int = Field(ge=1, le=1 << 12)
    head_dim: int = Field(ge=2, le=1 << 14)
    global_head_dim: int = Field(ge=2, le=1 << 14)
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = Field(default=0, ge=0)
    sliding_window: int = Field(ge=1, le=1 << 24)
    max_position_embeddings: int = Field(ge=1, le=1 << 24)
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size_per_layer_input: int = Field(default=0, ge=0, le=1 << 14)
    vocab_size_per_layer_input: int = Field(default=0, ge=0, le=1 << 24)
    num_experts: int = Field(default=0, ge=0, le=1 << 12)
    top_k_experts: int = Field(default=0, ge=0, le=1 << 12)
    moe_intermediate_size: int = Field(default=0, ge=0, le=1 << 20)
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = 30.0
    sliding_rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    eos_token_ids: tuple[int, ...] = (1,)
    bos_token_id: int = 2
    pad_token_id: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> ModelArchitecture:
        wide = self.intermediate_size + self.num_experts * self.moe_intermediate_size
        tables = self.num_hidden_layers * self.hidden_size_per_layer_input * self.vocab_size_per_layer_input
        if 3 * self.num_hidden_layers * self.hidden_size * wide + tables > MAX_PARAMETERS:
            raise ValueError(f"the geometry has more than {MAX_PARAMETERS:,} parameters")
        if any(not 0 <= i < self.num_hidden_layers for i in self.full_attention_layers):
            raise ValueError(f"full_attention layer index outside 0..{self.num_hidden_layers - 1}")
        if self.num_kv_shared_layers >= self.num_hidden_layers:
            raise ValueError("num_kv_shared_layers must be smaller than num_hidden_layers")
        for heads, kv in (
            (self.num_attention_heads, self.num_key_value_heads),
            (self.num_attention_heads, self.num_global_key_value_heads),
        ):
            if heads % kv:
                raise ValueError(f"num_attention_heads {heads} is not a multiple of the {kv} key/value heads")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input {self.vocab_size_per_layer_input} is below vocab_size {self.vocab_size}: "
                "some tokens would have no per-layer embedding"
            )
        if self.num_experts and self.hidden_size % EXPERT_WIDTH_MULTIPLE:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of {EXPERT_WIDTH_MULTIPLE}, as experts need"
            )
        owners = {self.kind(i) for i in range(self.first_shared_layer)}
        for index in range(self.first_shared_layer, self.num_hidden_layers):
            if self.kind(index) not in owners:
                raise ValueError(f"KV-shared layer {index} has no producer of kind {self.kind(index)} below it")
        return self

    def __hash__(self) -> int:
        """Of what tells models apart: plans look up what depends on one thousands of times."""
        return hash((self.num_hidden_layers, self.hidden_size, self.intermediate_size, self.dtype))

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer without a cache of its own (= num_hidden_layers when none shares)."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def last_owning_layer(self) -> int:
        """Index of the last layer with a cache of its own: once it has stored a step's rows, each request's last row is
        computed alone."""
        return self.first_shared_layer - 1

    @cached_property
    def _full(self) -> frozenset[int]:
        return frozenset(self.full_attention_layers)

    def kind(self, layer: int) -> LayerKind:
        return LayerKind.GLOBAL if layer in self._full else LayerKind.SLIDING

    def owns_cache(self, layer: int) -> bool:
        return layer < self.first_shared_layer

    def producer(self, layer: int) -> int:
        """Layer whose K and V this layer reads: itself, or the last owning layer of the same kind."""
        if self.owns_cache(layer):
            return layer
        kind = self.kind(layer)
        return max(i for i in range(self.first_shared_layer) if self.kind(i) is kind)

    def owning_layers(self, kind: LayerKind) -> tuple[int, ...]:
        return tuple(i for i in range(self.first_shared_layer) if self.kind(i) is kind)

    def layer_head_dim(self, layer: int) -> int:
        return self.global_head_dim if self.kind(layer) is LayerKind.GLOBAL else self.head_dim

    def layer_kv_heads(self, layer: int) -> int:
        return self.kv_heads(self.kind(layer))

    def kv_heads(self, kind: LayerKind) -> int:
        return self.num_global_key_value_heads if kind is LayerKind.GLOBAL else self.num_key_value_heads

    def kv_heads_per_rank(self, kind: LayerKind, tensor_parallel_size: int) -> int:
        """KV heads one rank holds; heads replicate once the tensor parallel size exceeds their number."""
        return max(1, self.kv_heads(kind) // tensor_parallel_size)

    def k_from_v(self, layer: int) -> bool:
        """True where K = rope(k_norm.weight * V) exactly: global layers of attention_k_eq_v models."""
        return self.attention_k_eq_v and self.kind(layer) is LayerKind.GLOBAL

    def layer_intermediate_size(self, layer: int) -> int:
        """Width of the dense MLP; `use_double_wide_mlp` doubles it on KV-shared layers only."""
        double = self.use_double_wide_mlp and not self.owns_cache(layer)
        return self.intermediate_size * (2 if double else 1)

    @property
    def global_rotary_pairs(self) -> int:
        """Rotated pairs (i, i + global_head_dim/2) of a global head; the rest of the head is not rotated."""
        return int(self.global_partial_rotary_factor * self.global_head_dim // 2)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelArchitecture:
        """Read a parsed config.json (multimodal wrapper or bare text config).

        How the weights are stored is read by `quantization.config.stated_format`. Raises UnsupportedModel for another
        architecture, and for a setting that is not served; InvalidInput for missing or contradictory fields.
        """
        if not isinstance(config, Mapping):
            raise InvalidInput(f"config.json must hold a JSON object, not {type(config).__name__}")
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise UnsupportedModel(
                f"model_type {model_type!r} is not served; this release serves Gemma 4 text models "
                f"({', '.join(MODEL_TYPES)})"
            )
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise InvalidInput("text_config must be a JSON object", field="text_config")
        try:
            return cls.model_validate(architecture_fields(text, config))
        except KeyError as error:
            raise InvalidInput(f"config.json lacks {error.args[0]!r}", field=str(error.args[0])) from error
        except ValidationError as error:
            field, message = first_fault(error)
            raise InvalidInput(f"config.json: {field or 'geometry'}: {message}", field=field or None) from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidInput(f"config.json: {error}") from error


def architecture_fields(text: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelArchitecture from a config and its `text_config`. Raises what a broken config does."""
    layer_types = text["layer_types"]
    if not isinstance(layer_types, list | tuple) or len(layer_types) != text["num_hidden_layers"]:
        raise ValueError(f"layer_types must list {text['num_hidden_layers']} layers")
    unknown = set(layer_types) - {kind.value for kind in LayerKind}
    if unknown:
        raise ValueError(f"unknown layer type {sorted(map(str, unknown))[0]!r}")
    rope = text.get("rope_parameters") or {}
    sliding_rope = rope.get(LayerKind.SLIDING.value) or {}
    global_rope = rope.get(LayerKind.GLOBAL.value) or {}
    dtype = (
        config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    )
    for name, value, served in (
        ("dtype", dtype, ("bfloat16", "float32")),
        ("hidden_activation", text.get("hidden_activation", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",)),
        ("attention_bias", text.get("attention_bias", False), (False,)),
        ("use_bidirectional_attention", text.get("use_bidirectional_attention"), (None, "vision")),
        ("rope_type of sliding layers", sliding_rope.get("rope_type", "default"), ("default",)),
        ("rope_type of global layers", global_rope.get("rope_type", "proportional"), ("proportional",)),
        ("rope factor of global layers", global_rope.get("factor", 1.0), (1.0,)),
    ):
        if value not in served:
            raise UnsupportedModel(
                f"config.json: {name} {value!r} is not supported; this release serves {', '.join(map(str, served))}"
            )
    moe = bool(text.get("enable_moe_block"))
    ple = int(text.get("hidden_size_per_layer_input") or 0)
    eos = config.get("eos_token_id", text.get("eos_token_id", 1))
    k_eq_v = bool(text.get("attention_k_eq_v"))
    kv_heads = text["num_key_value_heads"]
    overrides = _global_overrides(text, layer_types)
    global_heads = overrides.get("num_key_value_heads", text.get("num_global_key_value_heads")) if k_eq_v else None
    fields: dict[str, Any] = {
        "full_attention_layers": tuple(i for i, t in enumerate(layer_types) if t == LayerKind.GLOBAL.value),
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_heads or kv_heads,
        "global_head_dim": overrides.get("head_dim") or text.get("global_head_dim") or text["head_dim"],
        "attention_k_eq_v": k_eq_v,
        "num_kv_shared_layers": int(text.get("num_kv_shared_layers") or 0),
        "use_double_wide_mlp": bool(text.get("use_double_wide_mlp")),
        "hidden_size_per_layer_input": ple,
        "vocab_size_per_layer_input": int(text.get("vocab_size_per_layer_input") or text["vocab_size"]) if ple else 0,
        "num_experts": int(text["num_experts"]) if moe else 0,
        "top_k_experts": int(text["top_k_experts"]) if moe else 0,
        "moe_intermediate_size": int(text["moe_intermediate_size"]) if moe else 0,
        "final_logit_softcapping": text.get("final_logit_softcapping"),
        "sliding_rope_theta": sliding_rope.get("rope_theta", 10_000.0),
        "global_rope_theta": global_rope.get("rope_theta", 1_000_000.0),
        "global_partial_rotary_factor": global_rope.get("partial_rotary_factor", 0.25),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        "dtype": dtype,
        "eos_token_ids": tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
    }
    required = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "head_dim", "sliding_window", "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    fields.update({name: text[name] for name in required})
    for name in ("bos_token_id", "pad_token_id"):
        value = config.get(name, text.get(name))
        if value is not None:
            fields[name] = value
    return fields


def _global_overrides(text: Mapping[str, Any], layer_types: Sequence[str]) -> Mapping[str, Any]:
    """What `per_layer_config` says of the global layers, alike for all of them.

    Configs saved by transformers >= 5.20 give head_dim and num_key_value_heads of global layers there, by layer index,
    in place of global_head_dim and num_global_key_value_heads. The index may be padded with zeros.
    """
    per_layer = text.get("per_layer_config") or {}
    wanted = {i for i, kind in enumerate(layer_types) if kind == LayerKind.GLOBAL.value}
    if not per_layer:
        return {}
    overrides = [dict(override) for override in per_layer.values()]
    supported = {"head_dim", "num_key_value_heads"}
    if {int(i) for i in per_layer} != wanted or any(o != overrides[0] or not o.keys() <= supported for o in overrides):
        raise ValueError(
            "per_layer_config must give the same head_dim and num_key_value_heads to every full_attention layer"
        )
    return overrides[0]
