"""The decoder that is trained computes what the engine computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs import MODELS, config_json
from decoder import Decoder, Rows
from dense_attention import dense_logits
from safetensors.torch import save_file

from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.tiny.weights import PREFIX, tensor_shapes
from modelserve_worker.layers.placement import Placement
from modelserve_worker.weights.loader import load_model

WINDOW = 16
SMALL = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "head_dim": 16, "global_head_dim": 32,
         "hidden_size": 32, "intermediate_size": 48, "sliding_window": WINDOW}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_give_each_document_the_engines_logits(model: str, tmp_path: Path) -> None:
    """Two documents in one row, longer than two windows, and padding; logits at every place, in float32."""
    architecture = ModelArchitecture.from_config(config_json(model, **SMALL))
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in tensor_shapes(architecture):
        noise = torch.randn(shape, generator=generator)
        scale = shape[0] ** -0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        weights[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else (1 + 0.2 * noise) * scale
    save_file({PREFIX + name: w for name, w in weights.items()}, tmp_path / "model.safetensors")
    engine = load_model(architecture, tmp_path, Placement(torch.device("cpu"), torch.float32))

    lengths, length = (41, 50), 96
    ids = torch.randint(3, 96, (1, length), generator=generator)
    documents = torch.tensor([[0] * lengths[0] + [1] * lengths[1] + [-1] * (length - sum(lengths))])
    positions = torch.cat([torch.arange(n) for n in (*lengths, length - sum(lengths))])[None]
    places = torch.arange(length)[None]
    rows = Rows(ids, positions, documents, places, torch.zeros_like(places))
    got = Decoder(architecture, weights, dtype=torch.float32).logits(rows)[0]

    wanted = torch.cat([dense_logits(engine, ids[0, :41].tolist()), dense_logits(engine, ids[0, 41:91].tolist())])
    assert float((got[:91] - wanted).abs().max()) <= 1e-4
