"""The encoder that most Gemma 4 models see by: its geometry, as config.json states it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from modelserve.errors import UnsupportedModel

ACTIVATION = "gelu_pytorch_tanh"
_ROPE_TYPES = ("axial", "default", None)  # of which tools write either for what the encoder does


class TowerArchitecture(BaseModel):
    """Layers over the small patches of an image, `pooled` a side of which are averaged to a soft token. Sizes are
    element counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1, le=1 << 16)
    intermediate_size: int = Field(ge=1, le=1 << 18)
    layers: int = Field(ge=1, le=1 << 10)
    heads: int = Field(ge=1, le=1 << 10)
    head_dim: int = Field(ge=4, le=1 << 10, multiple_of=4, description="Half of it turns by x, half by y.")
    pooled: int = Field(ge=1, le=16)
    rope_theta: float = Field(gt=1)
    clipped: bool = Field(description="Whether inputs and outputs of linears have bounds, which the files hold.")
    standardised: bool = Field(description="Whether what is pooled has a bias taken off and is scaled.")

    @property
    def attention_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def patches(self) -> int:
        """Of one soft token."""
        return self.pooled**2

    @classmethod
    def from_vision_config(cls, vision: Mapping[str, Any]) -> TowerArchitecture:
        """Raises UnsupportedModel for an encoder that computes otherwise, and what a broken config does: KeyError,
        TypeError, ValidationError."""
        heads = vision["num_attention_heads"]
        rope = vision.get("rope_parameters") or {}
        for name, found, served in (
            ("num_key_value_heads", vision.get("num_key_value_heads", heads), (heads,)),
            ("hidden_activation", vision.get("hidden_activation", ACTIVATION), (ACTIVATION,)),
            ("rope_parameters.rope_type", rope.get("rope_type"), _ROPE_TYPES),
            ("attention_bias", bool(vision.get("attention_bias")), (False,)),
        ):
            if found not in served:
                raise UnsupportedModel(
                    f"config.json: vision_config.{name} {found!r}: encoders of Gemma 4 have {served[0]!r}; leave "
                    "modalities out for text"
                )
        hidden = vision["hidden_size"]
        return cls(
            hidden_size=hidden,
            intermediate_size=vision["intermediate_size"],
            layers=vision["num_hidden_layers"],
            heads=heads,
            head_dim=vision.get("head_dim") or hidden // heads,
            pooled=vision["pooling_kernel_size"],
            rope_theta=rope.get("rope_theta", 100.0),
            clipped=vision.get("use_clipped_linears", False),
            standardised=vision.get("standardize", False),
        )
