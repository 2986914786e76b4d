"""What a model makes of a sound: how many soft tokens it becomes, how long it may be, which model hears at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.audio_tower import CONVOLUTIONS, MEL_BINS, AudioTowerArchitecture
from modelserve.model.images import TOWERED, UNIFIED

RATE = 16_000
"""Samples a second of what the models hear."""

HOP, WINDOW = 160, 320  # samples: a frame of a spectrum every 10 ms, of 20 ms
TOWER_SECONDS = 30
"""Longest sound that the encoder was trained on; the reference cuts longer ones."""

TOWER_SOFT_TOKENS = 750
"""Of the longest sound."""

LEAST_SAMPLES = WINDOW + 1 - HOP
"""Of which there is a frame. The reference takes a sample more than the window, and 160 zeros lie before the first."""

_NEEDED = "E2B, E4B and the unified 12B hear; leave modalities.audio out"


def mel_frames(samples: int) -> int:
    """Frames of a spectrum of so many samples, of which none reaches behind the last."""
    return max(0, (samples - LEAST_SAMPLES) // HOP + 1)


class AudioArchitecture(BaseModel):
    """What makes rows of a sound: an encoder over its spectrum, or what embeds pieces of it as they are. Sizes are
    element counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embed_size: int = Field(ge=1, le=1 << 18, description="Of a row before it is projected to the text model's size.")
    rms_norm_eps: float = 1e-6
    tower: AudioTowerArchitecture | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def frame_values(self) -> int:
        """Of one frame of a sound as it comes to the model: bins of a spectrum, or samples."""
        return self.embed_size if self.tower is None else MEL_BINS

    @property
    def frames_per_row(self) -> int:
        """As many frames become one row, but for what is left at the end, which is one, too."""
        return 1 if self.tower is None else 1 << CONVOLUTIONS

    @property
    def least_samples(self) -> int:
        return 1 if self.tower is None else LEAST_SAMPLES

    @property
    def most_seconds(self) -> int | None:
        """Longest sound that is one span; None: as long as may be."""
        return None if self.tower is None else TOWER_SECONDS

    def problem(self, seconds: int) -> str | None:
        """Why sounds of so many seconds are not heard; None where they are."""
        if self.most_seconds is not None and seconds > self.most_seconds:
            return f"a sound of {seconds} s is longer than the {self.most_seconds} s that the model's encoder hears"
        return None

    def frames(self, samples: int) -> int:
        """Frames that a sound of so many samples comes in."""
        return -(-samples // self.embed_size) if self.tower is None else mel_frames(samples)

    def soft_tokens(self, samples: int) -> int:
        """Rows of the prompt that a sound of so many samples becomes."""
        return -(-self.frames(samples) // self.frames_per_row)

    @classmethod
    def found(cls, config: Mapping[str, Any]) -> AudioArchitecture | None:
        """`from_config`; None for a model that hears nothing here."""
        try:
            return cls.from_config(config)
        except InvalidInput:
            return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AudioArchitecture:
        """Read a parsed config.json. Raises UnsupportedModel for a model that hears nothing here, InvalidInput for
        missing or contradictory fields."""
        model_type, audio = config.get("model_type"), config.get("audio_config")
        if model_type not in (UNIFIED, TOWERED):
            raise UnsupportedModel(f"model_type {model_type!r}: {_NEEDED}")
        if not isinstance(audio, Mapping):
            raise UnsupportedModel(f"config.json has no audio_config: the checkpoint hears nothing; {_NEEDED}")
        try:
            if model_type == UNIFIED:
                return cls(embed_size=audio["audio_embed_dim"], rms_norm_eps=audio.get("rms_norm_eps", 1e-6))
            return cls(
                embed_size=audio.get("output_proj_dims", 1536),
                rms_norm_eps=audio.get("rms_norm_eps", 1e-6),
                tower=AudioTowerArchitecture.from_audio_config(audio),
            )
        except KeyError as error:
            name = f"audio_config.{error.args[0]}"
            raise InvalidInput(f"config.json lacks {name!r}", field=name) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"config.json: audio_config: {error}", field="audio_config") from error
