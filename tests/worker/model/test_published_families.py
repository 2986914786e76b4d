"""Every family of published quantised checkpoints, by its config and its tensors' names, at small sizes: it is read as
what it is, takes the bytes that a plan counts, and says what its dequantised elements say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import dense_logits
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, read_architecture, reference_logits
from published_configs import PUBLISHED
from published_layouts import write_dequantised
from quantise import quantised_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelserve.inspection import inspect_checkpoint, read_weight_format
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.quantization.linears import modules
from modelserve.model.weight_format import WeightFormat
from modelserve.sizing.weights.text import weight_bytes
from modelserve_worker.layers.stored.fp8 import Fp8Matrix

IDS = random_tokens(12, seed=20)
TEXT = "model.language_model."
# Widths of whole groups of 128, and few layers.
WIDTHS = {
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "global_head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CHANGES: dict[str, dict[str, int]] = {
    "12B": WIDTHS | {"num_global_key_value_heads": 1},
    "31B": WIDTHS | {"num_global_key_value_heads": 1},
    "E2B": WIDTHS | {"hidden_size_per_layer_input": 128},
    "E4B": WIDTHS | {"hidden_size_per_layer_input": 128},
    "26B-A4B": WIDTHS | {"num_global_key_value_heads": 1, "moe_intermediate_size": 128, "num_experts": 4},
}
TOWERS = (
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
    "model.embed_vision.embedding_projection.weight",
)
Sources = Callable[[str], Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    root = tmp_path_factory.mktemp("families")

    def source(variant: str) -> Path:
        if not (root / variant).exists():
            make_checkpoint(variant, root / variant, seed=3, **CHANGES[variant])
        return root / variant

    return source


def write_family(source: Path, output: Path, quantization: dict[str, Any], stored: WeightFormat) -> None:
    """A multimodal checkpoint of the text model in `source`: its config around `quantization_config` as published, its
    matrices in `stored`, and what the family has besides that is not read."""
    text = json.loads((source / "config.json").read_text())
    architecture = ModelArchitecture.from_config(text)
    wrapped = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    output.mkdir()
    (output / "config.json").write_text(json.dumps(wrapped | {"tie_word_embeddings": True} | quantization))
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    linears = [each for each in modules(architecture) if each not in stored.dense]
    made = quantised_tensors(bare, architecture, stored, linears, fused_experts=False)
    stated = quantization["quantization_config"]
    if stated["quant_method"] == "auto-round":  # which writes it for checkpoints with an activation order alone
        made = {name: tensor for name, tensor in made.items() if not name.endswith(".g_idx")}
    named = {TEXT + name: tensor.contiguous() for name, tensor in made.items()} | unused(made, stated, architecture)
    save_file(named | {name: torch.zeros(2, 2) for name in TOWERS}, output / "model.safetensors")


def unused(made: dict[str, Tensor], stated: dict[str, Any], architecture: ModelArchitecture) -> dict[str, Tensor]:
    """Scales of inputs and of the cache, as the config says that there are some."""
    text, found = str(stated), dict[str, Tensor]()
    owned = [layer for layer in range(architecture.num_hidden_layers) if architecture.owns_cache(layer)]
    if "kv_cache_scheme': {" in text:
        found |= {f"{TEXT}layers.{i}.self_attn.{name}_scale": torch.ones(1) for i in owned for name in "kv"}
    if "kv_cache_quant_algo" in text:
        found |= {f"{TEXT}layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(1.0) for i in owned for x in "kv"}
    if "'dynamic': 'local'" in text:
        packed = [name for name in made if name.endswith(".weight_global_scale")]
        found |= {TEXT + name.replace(".weight_", ".input_"): torch.ones(1) for name in packed}
    if "'dynamic': False, 'symmetric'" in text or stated["quant_method"] == "modelopt":
        scaled = [name for name in made if name.endswith(".weight_scale")]
        found |= {TEXT + name.replace(".weight_scale", ".input_scale"): torch.tensor(1.0) for name in scaled}
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_family_starts_and_answers_as_its_elements_do(name: str, sources: Sources, tmp_path: Path) -> None:
    variant, quantization, stored = PUBLISHED[name]
    directory = tmp_path / "published"
    write_family(sources(variant), directory, quantization, stored)
    assert read_weight_format(directory) == inspect_checkpoint(directory).format == stored
    model = load_checkpoint(directory)
    for each in (module for module in model.modules() if isinstance(module, Fp8Matrix)):
        each.rounds_inputs = False  # which the reference does not do
    architecture = read_architecture(directory)
    assert model.parameter_bytes() == weight_bytes(architecture, tensor_parallel_size=1, weight_format=stored)
    expected = reference_logits(write_dequantised(directory, tmp_path / "dense"), IDS).log_softmax(dim=-1)
    assert float((dense_logits(model, IDS).log_softmax(dim=-1) - expected).abs().max()) <= 2e-4
