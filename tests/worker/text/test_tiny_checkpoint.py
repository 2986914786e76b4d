"""Small random checkpoints: deterministic, complete for every variant, and accepted by an independent reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.tiny.__main__ import main, write_checkpoint
from modelserve_tools.tiny.variants import VARIANTS
from modelserve_tools.tiny.weights import PREFIX


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main([str(tmp_path / name), "--seed", str(seed), "--variant", "e4b"]) == 0
    a, b, c = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_loads_in_an_independent_reader_and_is_not_degenerate(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = write_checkpoint(tmp_path, variant=variant)
    architecture = ModelArchitecture.from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == size

    config = transformers.Gemma4TextConfig(**json.loads((tmp_path / "config.json").read_text())["text_config"])
    model = transformers.Gemma4ForCausalLM(config).float().eval()
    state = {name.replace(PREFIX, "model."): tensor.float() for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (unexpected, [name for name in missing if name != "lm_head.weight" and "embed_scale" not in name]) == (
        [],
        [],
    )
    with torch.no_grad():
        logits = model(torch.arange(238, 338).unsqueeze(0)).logits[0]
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
    assert 0.3 * math.log(architecture.vocab_size) < entropy < 0.999 * math.log(architecture.vocab_size)
    assert logits.argmax(-1).unique().numel() > 10
