"""What a model makes of an image: how large it is made, how many soft tokens it becomes, which model sees at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.image_tower import TowerArchitecture

BUDGETS = (70, 140, 280, 560, 1120)
"""Soft tokens that an image may become at most: what the models were trained with."""

DEFAULT_BUDGET = 280


def trained_budget(soft_tokens: int) -> int:
    """It, where the models know it. Raises ValueError, for pydantic."""
    if soft_tokens not in BUDGETS:
        raise ValueError(f"{soft_tokens} is none of the models' budgets, {', '.join(map(str, BUDGETS))}")
    return soft_tokens


UNIFIED, TOWERED = "gemma4_unified", "gemma4"
_SERVED = f"images are taken with {TOWERED} and {UNIFIED}; leave modalities out for text"


class ImageArchitecture(BaseModel):
    """What makes rows of an image's patches: a tower, or what embeds each patch by itself. Sizes are element counts;
    sides are pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    patch_side: int = Field(ge=1, le=256, description="A soft token is a square of so many pixels a side.")
    embed_size: int = Field(ge=1, le=1 << 18, description="Of a row before it is projected to the text model's size.")
    positions: int = Field(
        ge=1, le=1 << 16, description="Most patches a side, of the table of positions; a tower's are its small ones."
    )
    rms_norm_eps: float = 1e-6
    mutual: bool = Field(description="Whether rows of an image see each other in sliding layers.")
    tower: TowerArchitecture | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _consistent(self) -> ImageArchitecture:
        if self.tower is not None and self.patch_side % self.tower.pooled:
            raise ValueError(f"squares of {self.patch_side} pixels are not {self.tower.pooled} patches wide")
        return self

    @property
    def patch_values(self) -> int:
        """Of one soft token: its pixels in three colours."""
        return 3 * self.patch_side**2

    @property
    def longest(self) -> int:
        """Most soft tokens a side."""
        return self.positions // (self.tower.pooled if self.tower else 1)

    def problem(self, *, max_soft_tokens: int, max_num_batched_tokens: int) -> str | None:
        """Why images of so many soft tokens cannot be served in steps of so many; None where they can."""
        if self.longest < max_soft_tokens:
            return (
                f"an image of {max_soft_tokens} soft tokens may have as many a side, and the model's table has "
                f"positions for {self.longest}; allow fewer soft tokens"
            )
        if self.mutual and max_num_batched_tokens < max_soft_tokens:
            return (
                f"an image of {max_soft_tokens} soft tokens is computed in one step, and a step has "
                f"{max_num_batched_tokens} (maxNumBatchedTokens); raise that, or allow fewer soft tokens an image"
            )
        return None

    @classmethod
    def found(cls, config: Mapping[str, Any]) -> ImageArchitecture | None:
        """`from_config`; None for a model that this release takes no images with."""
        try:
            return cls.from_config(config)
        except InvalidInput:
            return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ImageArchitecture:
        """Read a parsed config.json. Raises UnsupportedModel for a model that this release takes no images with,
        InvalidInput for missing or contradictory fields."""
        model_type, vision = config.get("model_type"), config.get("vision_config")
        if model_type not in (UNIFIED, TOWERED):
            raise UnsupportedModel(f"model_type {model_type!r}: {_SERVED}")
        text = config.get("text_config")
        if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
            raise UnsupportedModel("config.json has no vision_config: the checkpoint takes no images")
        mutual = text.get("use_bidirectional_attention") == "vision"
        try:
            return _towered(vision, mutual=mutual) if model_type == TOWERED else _unified(vision, mutual=mutual)
        except KeyError as error:
            name = f"vision_config.{error.args[0]}"
            raise InvalidInput(f"config.json lacks {name!r}", field=name) from error
        except (ValidationError, TypeError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"config.json: vision_config: {error}", field="vision_config") from error


def _unified(vision: Mapping[str, Any], *, mutual: bool) -> ImageArchitecture:
    size = vision["mm_embed_dim"]
    projected = vision.get("output_proj_dims", size)
    if projected != size:
        raise UnsupportedModel(
            f"config.json: vision_config.output_proj_dims {projected} differs from mm_embed_dim {size}; what is "
            "embedded is projected as it is"
        )
    return ImageArchitecture(
        patch_side=vision["patch_size"] * vision["pooling_kernel_size"],
        embed_size=size,
        positions=vision["mm_posemb_size"],
        rms_norm_eps=vision.get("rms_norm_eps", 1e-6),
        mutual=mutual,
    )


def _towered(vision: Mapping[str, Any], *, mutual: bool) -> ImageArchitecture:
    tower = TowerArchitecture.from_vision_config(vision)
    return ImageArchitecture(
        patch_side=vision["patch_size"] * tower.pooled,
        embed_size=tower.hidden_size,
        positions=vision["position_embedding_size"],
        rms_norm_eps=vision.get("rms_norm_eps", 1e-6),
        mutual=mutual,
        tower=tower,
    )


def resized(height: int, width: int, *, budget: int, patch_side: int) -> tuple[int, int]:
    """Height and width in pixels that an upright image of `height` x `width` is resized to: whole patches, at most
    `budget`, its aspect kept within a patch. Small images grow; of very long ones the short side is one patch.

    As the reference processor computes it, in the same floating-point steps: a size that differs by one rounding would
    be another number of tokens.
    """
    factor = math.sqrt(budget * patch_side**2 / (height * width))
    high, wide = (math.floor(factor * side / patch_side) * patch_side for side in (height, width))
    longest = budget * patch_side
    if not high:
        return patch_side, min(width // height * patch_side, longest)
    if not wide:
        return min(height // width * patch_side, longest), patch_side
    return high, wide


def soft_tokens(height: int, width: int, *, budget: int, patch_side: int) -> int:
    """Patches of the resized image, each a row of the prompt."""
    high, wide = resized(height, width, budget=budget, patch_side=patch_side)
    return high * wide // patch_side**2
