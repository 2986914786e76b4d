"""The trained models as GGUF files: what they say is what the dequantised elements say, and right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import write_dequantised, write_gguf
from teacher_forcing import EngineLogits, TransformersLogits, checkpoint_renderer, is_exact, render_cell

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

pytest.importorskip("gguf")

HERE = Path(__file__).parent
CPU = torch.device("cpu")
ASKED = (Cell("arithmetic", None, 2), Cell("facts", None, 2), Cell("recall", 10, 1))
TOLERANCE = 2e-4  # of log probabilities


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("model", ["keqv", "ple"])
def test_log_probabilities_are_those_of_the_dequantised_elements(model: str, kind: str, tmp_path: Path) -> None:
    source, directory = HERE / f"gemma4-tiny-{model}", tmp_path / "gguf"
    directory.mkdir()
    write_gguf(source, kind, directory / "m.gguf")
    renderer = checkpoint_renderer(source)
    asked = [each for cell in ASKED for each in render_cell(renderer, cell, seed=7)]
    dense = write_dequantised(source, directory / "m.gguf", tmp_path / "dense")
    expected = TransformersLogits(dense, dtype=torch.float32, device=CPU)(asked)
    ours = EngineLogits(directory, dtype=torch.float32, device=CPU)(asked)
    for one, reference in zip(ours, expected, strict=True):
        assert float((one.log_softmax(-1) - reference.log_softmax(-1)).abs().max()) <= TOLERANCE
    answers = EngineLogits(directory, dtype=torch.bfloat16, device=CPU)(asked)
    assert all(is_exact(one, logits) for one, logits in zip(asked, answers, strict=True))


@pytest.mark.parametrize("model", ["keqv", "ple"])
def test_text_becomes_the_same_ids(model: str, tmp_path: Path) -> None:
    source = HERE / f"gemma4-tiny-{model}"
    write_gguf(source, "Q8_0", tmp_path / "m.gguf")
    theirs, ours = load_checkpoint_text(source), load_checkpoint_text(tmp_path)
    assert ours.vocabulary == theirs.vocabulary
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    messages = [{"role": "user", "content": "What is 2 + 3?\n\U0001f642 <bos>"}]
    prompts = [each.chat_template.render(messages) for each in (theirs, ours) if each.chat_template is not None]
    assert prompts[0] == prompts[1]
    for text in (*prompts, "caf\u00e9\n\n\u2581 <0x41>"):
        assert ours.tokenizer.encode(text).ids == theirs.tokenizer.encode(text).ids
