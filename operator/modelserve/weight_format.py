"""Storage formats of text weights: which there are, which this release loads, and how a config.json states one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from modelserve.errors import UnsupportedModel

INT4_GROUP = 32  # elements of the input dimension that share one scale


class WeightFormat(StrEnum):
    """How the linear layers are stored; embeddings, norms and the router are bfloat16 in the quantised formats."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT4_G32 = "int4_g32"  # compressed-tensors pack-quantized: symmetric int4, one bfloat16 scale per 32 inputs
    FP8_CHANNEL = "fp8_channel"  # compressed-tensors float-quantized: e4m3, one bfloat16 scale per output row

    @property
    def servable(self) -> bool:
        """Whether the engine of this release loads it; the others can be planned for."""
        return self in (WeightFormat.BFLOAT16, WeightFormat.FLOAT32)


def quantised_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """The format that `quantization_config` of a config.json states; None where there is none.

    Raises UnsupportedModel, naming what was found, for every scheme whose bytes are not known here.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "compressed-tensors":
        method = stated.get("quant_method") if isinstance(stated, Mapping) else type(stated).__name__
        raise _unknown(f"quant_method {str(method)[:64]}")
    groups = stated.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    found = {_scheme_format(scheme) for scheme in schemes}
    if len(found) != 1:
        raise _unknown(f"{len(found)} weight schemes in config_groups")
    return found.pop()


def _scheme_format(scheme: object) -> WeightFormat:
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _unknown("a config group without weights")
    stated = tuple(weights.get(name) for name in ("type", "num_bits", "strategy", "group_size"))
    symmetric = weights.get("symmetric", True) is True
    if symmetric and stated == ("int", 4, "group", INT4_GROUP):
        return WeightFormat.INT4_G32
    if symmetric and stated[:3] == ("float", 8, "channel"):
        return WeightFormat.FP8_CHANNEL
    shown = ", ".join(
        f"{name} {str(weights.get(name))[:32]}" for name in ("type", "num_bits", "strategy", "group_size")
    )
    raise _unknown(f"weights of {shown}{'' if symmetric else ', asymmetric'}")


def _unknown(found: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config: {found} is not known; use a bfloat16 checkpoint, or plan for compressed-tensors int4 "
        f"(symmetric, groups of {INT4_GROUP}) or fp8 per channel",
        field="quantization_config",
    )
