"""The trained models in the published INT4 and FP8 layouts: their logits, and what is left of their skills."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantise import main
from teacher_forcing import EngineLogits, TransformersLogits, checkpoint_renderer, is_exact, render_cell

from modelserve.inspection import read_weight_format
from modelserve.model.weight_format import TextLinear
from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.layers.stored.fp8 import Fp8Matrix

sys.path.append(str(Path(__file__).parents[1] / "worker" / "model"))  # for those who are not run by pytest

from published_layouts import write_dequantised

HERE = Path(__file__).parent
CPU = torch.device("cpu")
ASKED = (Cell("arithmetic", None, 2), Cell("facts", None, 2), Cell("recall", 10, 1))
MADE = [
    *(("keqv", name) for name in ("int4_g32", "int4_g128_asym", "int4_g128_actorder", "fp8_channel")),
    *(("keqv", name) for name in ("nvfp4", "awq_g32", "int8_channel")),
    *(("ple", name) for name in ("int4_g32", "fp8_block")),
]
Quantised = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    root = tmp_path_factory.mktemp("quantised")

    def make(model: str, name: str) -> Path:
        directory = root / f"{model}-{name}"
        if not directory.exists():
            source = HERE / f"gemma4-tiny-{model}"
            assert main([str(source), "--format", name, "--output", str(directory)]) == 0
        return directory

    return make


@pytest.mark.parametrize(("model", "name"), MADE)
def test_logits_are_those_of_the_dequantised_elements(
    model: str, name: str, quantised: Quantised, tmp_path: Path
) -> None:
    """In float32, at the answers' places; and the bfloat16 engine gives the answers that the trained model gives."""
    directory = quantised(model, name)
    renderer = checkpoint_renderer(directory)
    asked = [each for cell in ASKED for each in render_cell(renderer, cell, seed=7)]
    dense = write_dequantised(directory, tmp_path / "dense", prefix="model.language_model.")
    expected = TransformersLogits(dense, dtype=torch.float32, device=CPU)(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Matrix, "_rounded", lambda _, x: x)  # which transformers does not do
        ours = EngineLogits(directory, dtype=torch.float32, device=CPU)(asked)
    for one, reference in zip(ours, expected, strict=True):
        assert float((one - reference).abs().max()) <= 5e-4
    answers = EngineLogits(directory, dtype=torch.bfloat16, device=CPU)(asked)
    assert all(is_exact(one, logits) for one, logits in zip(asked, answers, strict=True))


def test_what_fills_no_groups_is_left_and_named(quantised: Quantised) -> None:
    """112 inputs are 3.5 groups of 32: the script leaves those layers, all of a kind, and the config says so."""
    dense = (TextLinear.QKV, TextLinear.GATE_UP, TextLinear.LAYER_INPUT_GATE, TextLinear.MODEL_PROJECTION)
    assert read_weight_format(quantised("ple", "int4_g32")).dense == dense
    assert read_weight_format(quantised("keqv", "int4_g32")).dense == ()
    assert read_weight_format(quantised("ple", "fp8_channel")).dense == ()


def test_what_the_script_leaves_on_request(tmp_path: Path) -> None:
    source = str(HERE / "gemma4-tiny-keqv")
    assert main([source, "--format", "fp8_tensor", "--output", str(tmp_path / "out"), "--leave", "qkv", "o"]) == 0
    assert read_weight_format(tmp_path / "out").dense == (TextLinear.QKV, TextLinear.OUTPUT)
