"""Teacher forcing tells what greedy decoding says, and the engine's logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs import MODELS
from rendering import Rendered
from teacher_forcing import (
    AnswerLogits,
    EngineLogits,
    TransformersLogits,
    checkpoint_renderer,
    divergence,
    is_exact,
    render_cell,
)
from untrained import write_untrained

from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_tools.evaluation.cells import Cell

CPU = torch.device("cpu")
CELLS = (Cell("recall", 150, 2), Cell("tool_call", None, 2), Cell("copying", None, 3))
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_untrained(path, request.param)
    return path


def rendered(directory: Path) -> list[Rendered]:
    renderer = checkpoint_renderer(directory)
    return [each for cell in CELLS for each in render_cell(renderer, cell, seed=7)]


def test_the_engine_says_what_transformers_says(directory: Path) -> None:
    asked = rendered(directory)
    reference = TransformersLogits(directory, dtype=torch.float32, device=CPU)(asked)
    for chunk in (48, 512):
        ours = EngineLogits(directory, dtype=torch.float32, device=CPU, chunk=chunk, max_num_seqs=3)(asked)
        for one, theirs, mine in zip(asked, reference, ours, strict=True):
            assert mine.shape == theirs.shape == (len(one.token_ids) - one.prompt_tokens, 2048)
            assert float((mine - theirs).abs().max()) <= TOLERANCE
            assert float(divergence(theirs, mine).mean()) <= TOLERANCE**2


def test_block_local_attention_is_the_definition(directory: Path) -> None:
    """Prompts shorter and longer than the window, in one padded pass."""
    asked = rendered(directory)
    reference = TransformersLogits(directory, dtype=torch.float32, device=CPU, attention="eager")(asked)
    ours = TransformersLogits(directory, dtype=torch.float32, device=CPU, attention="block_local")(asked)
    assert max(float((a - b).abs().max()) for a, b in zip(reference, ours, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("kv_dtype", [KVCacheDtype.BFLOAT16, KVCacheDtype.INT8, KVCacheDtype.FP8_E4M3])
def test_coarser_rows_diverge_and_no_more_than_they_must(directory: Path, kv_dtype: KVCacheDtype) -> None:
    asked = rendered(directory)
    exact = EngineLogits(directory, dtype=torch.float32, device=CPU)(asked)
    layout = KVCacheLayout.KV
    coarse = EngineLogits(directory, dtype=torch.float32, device=CPU, kv_dtype=kv_dtype, layout=layout)(asked)
    lost = torch.cat([divergence(a, b) for a, b in zip(exact, coarse, strict=True)])
    assert float(lost.min()) > 0
    assert float(lost.mean()) < 0.02


def test_exact_is_what_greedy_decoding_says(directory: Path) -> None:
    """The answer is what the model itself says after the prompt, and then that answer with one token changed."""
    reference = TransformersLogits(directory, dtype=torch.float32, device=CPU)
    engine = EngineLogits(directory, dtype=torch.float32, device=CPU)
    prompt = rendered(directory)[0]
    start, said = prompt.prompt_tokens, list(prompt.token_ids[: prompt.prompt_tokens])
    for _ in range(4):
        said.append(int(reference([Rendered((*said, 0), ((len(said), len(said) + 1),))])[0].argmax()))
    right = Rendered(tuple(said), ((start, len(said)),))
    wrong = Rendered((*said[:-2], (said[-2] + 1) % 2048, said[-1]), right.answers)
    for logits in (reference, engine):
        assert_exactness(logits, right, expected=True)
        assert_exactness(logits, wrong, expected=False)


def assert_exactness(logits: AnswerLogits, rendered: Rendered, *, expected: bool) -> None:
    (rows,) = logits([rendered])
    assert is_exact(rendered, rows) is expected


def test_divergence_is_the_mean_log_ratio_under_the_reference() -> None:
    """log(p / q) is log 1.5 with weight 3/4 and log 0.5 with weight 1/4."""
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    assert divergence(p, q).tolist() == pytest.approx([float(expected)], rel=1e-6)
    assert divergence(p, p + 3).abs().max() < 1e-12
