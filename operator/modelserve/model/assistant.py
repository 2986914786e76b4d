"""The geometry of an MTP assistant (`gemma4_assistant`), and whether it fits a target.

An assistant is a few decoder layers with queries only: they attend to the last sliding and the last global cache of its
target. Its input is the embedding of the last token and the hidden state that it was drawn from, both of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from modelserve.errors import UnsupportedModel
from modelserve.model.architecture import LayerKind, ModelArchitecture, architecture_fields
from modelserve.model.drafter_config import faults_of_a_config

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class AssistantArchitecture(ModelArchitecture):
    """Layers without caches of their own; heads count the whole model, not one rank."""

    backbone_hidden_size: int = Field(ge=1, le=1 << 18)  # of the target
    num_centroids: int = Field(default=0, ge=0, le=1 << 20)  # groups of the vocabulary; 0: the head scores all tokens
    centroid_top_k: int = Field(default=0, ge=0, le=1 << 12)  # of which so many are scored

    @model_validator(mode="after")
    def _consistent(self) -> AssistantArchitecture:
        """Of all checks of a model's geometry those that an assistant can fail."""
        if self.num_kv_shared_layers != self.num_hidden_layers:
            raise ValueError(
                f"num_kv_shared_layers {self.num_kv_shared_layers} of {self.num_hidden_layers} layers: an assistant "
                "reads its target's caches in all of them"
            )
        if self.num_experts or self.hidden_size_per_layer_input:
            raise ValueError("an assistant has neither experts nor per-layer embeddings")
        if self.num_centroids and (
            self.vocab_size % self.num_centroids or not 0 < self.centroid_top_k <= self.num_centroids
        ):
            raise ValueError(
                f"num_centroids {self.num_centroids} does not divide vocab_size {self.vocab_size}, or "
                f"centroid_intermediate_top_k {self.centroid_top_k} is not one of 1..{self.num_centroids}"
            )
        return self

    @property
    def centroid_tokens(self) -> int:
        """Tokens that the head scores, of each row."""
        return self.vocab_size // self.num_centroids * self.centroid_top_k if self.num_centroids else self.vocab_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AssistantArchitecture:
        """Read a parsed config.json. Raises UnsupportedModel for another model, InvalidInput for a broken config."""
        model_type = config.get("model_type") if isinstance(config, Mapping) else None
        if model_type not in ASSISTANT_TYPES:
            raise UnsupportedModel(
                f"drafter: model_type {model_type!r} is no MTP assistant; this release drafts with "
                f"{', '.join(ASSISTANT_TYPES)}"
            )
        if config.get("quantization_config"):
            raise UnsupportedModel(
                "drafter: the assistant's weights are quantised; use the assistant in bfloat16, which is a few hundred "
                "megabytes"
            )
        ordered = bool(config.get("use_ordered_embeddings"))
        try:
            with faults_of_a_config():
                fields = architecture_fields(config["text_config"], config) | {
                    "backbone_hidden_size": config["backbone_hidden_size"],
                    "num_centroids": int(config["num_centroids"]) if ordered else 0,
                    "centroid_top_k": int(config["centroid_intermediate_top_k"]) if ordered else 0,
                }
                return cls.model_validate(fields)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"drafter: {error}") from error


def pair_problem(target: ModelArchitecture, assistant: AssistantArchitecture) -> str | None:
    """What keeps an assistant from drafting for a target, or None: it reads that one's caches and hidden states."""
    kinds = sorted({assistant.kind(layer) for layer in range(assistant.num_hidden_layers)})
    pairs = [
        ("backbone_hidden_size", assistant.backbone_hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", assistant.vocab_size, "vocab_size", target.vocab_size),
    ]
    names = []
    if LayerKind.SLIDING in kinds:
        names += ["head_dim", "sliding_window", "sliding_rope_theta"]
    if LayerKind.GLOBAL in kinds:
        names += ["global_head_dim", "global_rope_theta", "global_partial_rotary_factor"]
    pairs += [(name, getattr(assistant, name), name, getattr(target, name)) for name in names]
    for mine, value, theirs, wanted in pairs:
        if value != wanted:
            return (
                f"the drafter's {mine} {value} is not the model's {theirs} {wanted}: it is the assistant of another "
                "model; name the one that was published with this model"
            )
    for kind in kinds:
        if not target.owning_layers(kind):
            return (
                f"the drafter reads a {kind.value} cache and the model has none: it is the assistant of another model"
            )
        if assistant.num_attention_heads % target.kv_heads(kind):
            return (
                f"the drafter's {assistant.num_attention_heads} query heads are not a multiple of the model's "
                f"{target.kv_heads(kind)} {kind.value} KV heads: it is the assistant of another model"
            )
    return None
