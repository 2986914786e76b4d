"""LoRA factors of a trained checkpoint: which matrices, how they begin, and the two files that PEFT would write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from modelserve.model.architecture import ModelArchitecture

PREFIX = "base_model.model.model.language_model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")

Factors = dict[str, tuple[Tensor, Tensor]]
"""By a matrix's name in the checkpoint, without ".weight": A float32 [r, inputs], B float32 [outputs, r]."""


def initial_factors(
    weights: Mapping[str, Tensor], architecture: ModelArchitecture, *, targets: tuple[str, ...], rank: int, seed: int
) -> Factors:
    """A uniform within 1 / sqrt(inputs) and B zero, as PEFT begins, of every matrix of `targets` that has an effect:
    a layer that reads another's keys and values has projections of its own that nobody reads."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(architecture.num_hidden_layers):
        for target in targets:
            if target in ("k_proj", "v_proj") and not architecture.owns_cache(layer):
                continue
            name = f"layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}"
            if (weight := weights.get(f"{name}.weight")) is None:  # values of a layer that makes them of its keys
                continue
            outputs, inputs = weight.shape
            a = (torch.rand(rank, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)
            factors[name] = (a, torch.zeros(outputs, rank))
    return factors


def with_factors(weights: Mapping[str, Tensor], factors: Factors, *, scale: float) -> dict[str, Tensor]:
    """W + scale * B A where there are factors; differentiable in them. Keys that are values too change as both."""
    added = {f"{name}.weight": scale * (b @ a) for name, (a, b) in factors.items()}
    return {name: weight + added[name] if name in added else weight for name, weight in weights.items()}


def write_adapter(factors: Factors, directory: Path, *, base: str, rank: int, alpha: float) -> int:
    """adapter_config.json and bfloat16 factors in PEFT's layout. Returns the factors' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in factors}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {}
    for name, (a, b) in factors.items():
        for letter, factor in (("A", a), ("B", b)):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = factor.detach().to("cpu", torch.bfloat16).contiguous()
    path = directory / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size
