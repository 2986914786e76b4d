"""Checkpoints of the trained models' structure with random weights, and by default few of them, for tests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from configs import TEMPLATE_OF, config_json
from safetensors.torch import save_file
from torch import Tensor
from word_tokenizer import write_word_tokenizer

from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.weights import PREFIX, tensor_shapes

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "global_head_dim": 32, "sliding_window": 40,
}  # fmt: skip


def write_untrained(directory: Path, model: str, *, seed: int = 1, changes: Mapping[str, Any] = SMALL) -> None:
    """Config, float32 weights, tokenizer and template of `model` of configs.MODELS with `changes` of its sizes."""
    config = config_json(model, **changes) | {"dtype": "float32"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_word_tokenizer(directory, chat_template=chat_template(TEMPLATE_OF[model]))
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(ModelArchitecture.from_config(config))
    weights = {PREFIX + name: random_tensor(name, shape, generator) for name, shape in shapes}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Attention scores of variance 1 (q_norm * k_norm ~ 1 / sqrt(d)), matrices of unit gain, the rest 1 +- 0.2."""
    noise: Tensor = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise * math.pow(shape[-1], -0.5)
    scale = math.pow(shape[0], -0.25) if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
    return (1.0 + 0.2 * noise) * scale
