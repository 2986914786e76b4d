"""The encoder that E2B and E4B hear by: its geometry, as config.json states it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelserve.errors import UnsupportedModel

MEL_BINS = 128
"""Of a frame of sound: what the encoder's convolutions were trained on."""

CONVOLUTIONS = 2  # of a stride of 2 in time and in frequency
LINEAR_EPS = 1e-6  # of norms around feed-forwards and attention, whatever the config says of the others


class AudioTowerArchitecture(BaseModel):
    """A conformer over frames of 40 ms: each sees itself and `keys` - 1 before it. Sizes are element counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1, le=1 << 16)
    layers: int = Field(ge=1, le=1 << 10)
    heads: int = Field(ge=1, le=1 << 10)
    channels: tuple[int, int] = Field(description="Of the two convolutions that make a frame of four.")
    kernel: int = Field(ge=1, le=256, description="Frames that a layer's convolution looks at, the last its own.")
    keys: int = Field(ge=1, le=1 << 10, description="Frames that attention looks at, the last its own.")
    logit_cap: float = Field(gt=0)
    invalid_logit: float = Field(lt=0)
    residual_weight: float
    most: float = Field(gt=0, description="Beyond which numbers between modules are cut.")
    clipped: bool = Field(description="Whether inputs and outputs of linears have bounds, which the files hold.")

    @model_validator(mode="after")
    def _consistent(self) -> AudioTowerArchitecture:
        if self.hidden_size % self.heads or self.hidden_size % 2:
            raise ValueError(f"a width of {self.hidden_size} is not {self.heads} heads, or not even")
        if min(self.channels) < 1 or max(self.channels) > 1 << 12:
            raise ValueError(f"convolutions of {self.channels} channels")
        if self.kernel > self.keys + 1:
            raise ValueError(f"a convolution that looks at {self.kernel} frames, beyond the {self.keys} of attention")
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def feed_forward_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def subsampled_size(self) -> int:
        """Of a frame behind the convolutions, channels of all its bins."""
        return self.channels[1] * (MEL_BINS >> CONVOLUTIONS)

    @classmethod
    def from_audio_config(cls, audio: Mapping[str, Any]) -> AudioTowerArchitecture:
        """Raises UnsupportedModel for an encoder that computes otherwise, and what a broken config does: KeyError,
        TypeError, ValidationError."""
        chunk = audio.get("attention_chunk_size", 12)
        for name, found, served in (
            ("hidden_act", audio.get("hidden_act", "silu"), "silu"),
            ("attention_context_left", audio.get("attention_context_left", chunk + 1), chunk + 1),
            ("attention_context_right", audio.get("attention_context_right", 0), 0),
        ):
            if found != served:
                raise UnsupportedModel(
                    f"config.json: audio_config.{name} {found!r}: encoders of Gemma 4 have {served!r}; leave "
                    "modalities.audio out"
                )
        first, second = audio["subsampling_conv_channels"]
        return cls(
            hidden_size=audio["hidden_size"],
            layers=audio["num_hidden_layers"],
            heads=audio["num_attention_heads"],
            channels=(first, second),
            kernel=audio["conv_kernel_size"],
            keys=chunk,
            logit_cap=audio.get("attention_logit_cap", 50.0),
            invalid_logit=audio.get("attention_invalid_logits_value", -1e9),
            residual_weight=audio.get("residual_weight", 0.5),
            most=audio.get("gradient_clipping", 1e10),
            clipped=audio.get("use_clipped_linears", True),
        )
