"""What the core binds of an adapter is what PEFT adds to the weights: every factor, scale and order of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_checkpoints import make_checkpoint
from peft_adapters import EXPERT_WIDTH, EXPERTS, LINEARS, PER_LAYER, adapted
from safetensors.torch import load_file
from torch import Tensor

from modelserve.inspection import read_architecture
from modelserve.model.adapters.binding import Factors, read_adapter
from modelserve.model.adapters.config import ADAPTER_FILE

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks it


def term(factors: Factors, tensors: dict[str, Tensor]) -> Tensor:
    """What is added to a module's weight [outputs, inputs], or to that of all experts [experts, outputs, inputs]."""
    a, b = (tensors[each.name].double() for each in (factors.a, factors.b))
    if experts := factors.module.experts:
        a = a.view(experts, factors.rank, -1)
        b = b.view(b.shape[0], factors.rank, experts).permute(2, 0, 1)
        added = (b @ a).mT if factors.turned else b @ a
    else:
        added = b @ a
    return factors.scale * added


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("E2B", {"target_modules": LINEARS + PER_LAYER, "use_rslora": True}),
        ("E4B", {"target_modules": LINEARS, "layers_to_transform": [0, 3, 7]}),
        ("12B", {"target_modules": "all-linear", "alpha_pattern": {"o_proj": 1.5}}),
        ("26B-A4B", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
        ("26B-A4B", {"target_modules": ["gate_proj"], "target_parameters": EXPERTS[:1]}),
        ("31B", {"target_modules": LINEARS, "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 7}}),
    ],
)
def test_terms_are_what_peft_merges(variant: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "adapter"
    make_checkpoint(variant, base, seed=5, **(EXPERT_WIDTH if variant == "26B-A4B" else {}))
    before = {name: weight.double() for name, weight in load_file(base / "model.safetensors").items()}
    merged = adapted(base, saved, **settings).merge_and_unload().state_dict()
    adapter = read_adapter(saved, read_architecture(base))
    tensors = load_file(saved / ADAPTER_FILE)
    assert {each.name for one in adapter.factors for each in (one.a, one.b)} == set(tensors)
    changed = set()
    for factors in adapter.factors:
        name = next(each for each in (f"model.{factors.name}.weight", f"model.{factors.name}") if each in before)
        added = merged[name].double() - before[name]
        assert float((added - term(factors, tensors)).abs().max()) <= 2e-6
        assert float(added.abs().max()) > 1e-3
        changed.add(name)
    for name, weight in before.items():
        if name not in changed and name in merged:
            assert torch.equal(merged[name].double(), weight), name


def test_another_order_of_experts_would_show(tmp_path: Path) -> None:
    """B's columns of an expert lie `experts` apart; A's rows of one together: neither order serves for both."""
    base, saved = tmp_path / "base", tmp_path / "adapter"
    make_checkpoint("26B-A4B", base, seed=5, **EXPERT_WIDTH)
    adapted(base, saved, target_modules=["o_proj"], target_parameters=EXPERTS)
    tensors = load_file(saved / ADAPTER_FILE)
    adapter = read_adapter(saved, read_architecture(base))
    factors = next(each for each in adapter.factors if each.module.experts)
    b = tensors[factors.b.name]
    other = b.view(b.shape[0], factors.module.experts, factors.rank).transpose(1, 2).reshape(b.shape)
    assert not torch.allclose(term(factors, tensors), term(factors, tensors | {factors.b.name: other}), atol=1e-3)
