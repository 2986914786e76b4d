"""`modelserve-eval --against` over HTTP: workers with a trained model, its INT4 and a damaged copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantise import main as quantise
from safetensors.torch import load_file, save_file
from served_checkpoints import served_checkpoints

from modelserve_tools.evaluation.__main__ import main

TRAINED = Path(__file__).parents[2] / "models" / "gemma4-tiny-keqv"

# One request at a time: a batch's neighbours move the last bits of bfloat16.
ASKED = ("--skills", "facts,arithmetic,needle", "--distances", "10", "--n", "2", "--concurrency", "1")


def _damaged(directory: Path) -> Path:
    """The down projections have noise of twice their elements' size."""
    shutil.copytree(TRAINED, directory)
    tensors = load_file(directory / "model.safetensors")
    chance = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith("mlp.down_proj.weight"):
            noise = torch.randn(weight.shape, generator=chance) * weight.float().std()
            tensors[name] = (weight.float() + 2 * noise).to(weight.dtype)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[dict[str, str]]:
    folder = tmp_path
    assert quantise([str(TRAINED), "--format", "int4_g32", "--output", str(folder / "int4")]) == 0
    models = {"trained": TRAINED, "int4": folder / "int4", "damaged": _damaged(folder / "damaged")}
    limits = {"maxModelLen": 512, "maxNumSeqs": 2, "maxNumBatchedTokens": 256}
    with served_checkpoints(folder, models, **limits) as served:
        yield served


def _document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*arguments, *ASKED, "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


def _all(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["tokens_of"]: each for each in document["scores"] if each["skill"] is None}


def test_a_model_beside_itself_its_int4_and_a_damaged_copy(
    urls: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = _document(capsys, "--base-url", urls["trained"], "--against", urls["trained"])
    assert (same["left"], same["errors"]) == ([], 0)
    for each in same["scores"]:
        assert (each["mean_kl"], each["most_kl"], each["top_1_percent"], each["mean_shift"]) == (0, 0, 100, 0), each
    assert [(each["skill"], each["texts"]) for each in same["scores"]] == [
        (None, 6), (None, 6), ("facts", 2), ("arithmetic", 2), ("needle", 2)
    ]  # fmt: skip
    assert all((cell["pairs"], cell["lost"], cell["gained"]) == (2, 0, 0) for cell in same["exercises"]["cells"])

    rounded = _document(capsys, "--base-url", urls["int4"], "--against", urls["trained"], "--kl-at-most", "0.01")
    answers, prompts = _all(rounded)["answers"], _all(rounded)["prompts"]
    assert answers["tokens"] == _all(same)["answers"]["tokens"]
    assert 0 < answers["mean_kl"] <= answers["kl_99_percent"] <= answers["most_kl"]
    # format_quality.json has 5.8e-2 nats and 94.7 % over whole distributions of other prompts.
    assert 0.01 < prompts["mean_kl"] < 0.3
    assert 85 < prompts["top_1_percent"] < 100
    assert rounded["served"]["model"] == "int4"

    damaged = _document(
        capsys, "--base-url", urls["damaged"], "--against", urls["trained"], "--kl-at-most", "0.01", code=1
    )
    assert _all(damaged)["answers"]["mean_kl"] > 100 * max(answers["mean_kl"], 1e-4)
    assert _all(damaged)["prompts"]["mean_kl"] > 3 * prompts["mean_kl"]
    assert _all(damaged)["prompts"]["top_1_percent"] < prompts["top_1_percent"] - 10
    assert sum(cell["lost"] for cell in damaged["exercises"]["cells"]) > 0

    # What one GPU cannot serve at a time is recorded first, and is the same as asked.
    recording = str(tmp_path / "reference.gz")
    assert main(["--base-url", urls["trained"], *ASKED, "--record", recording]) == 0
    capsys.readouterr()
    read = _document(capsys, "--base-url", urls["int4"], "--against", recording)
    assert (read["scores"], read["exercises"]["cells"]) == (rounded["scores"], rounded["exercises"]["cells"])
    assert main(["--base-url", urls["int4"], "--against", recording, *ASKED, "--seed", "3"]) == 2
    assert "was recorded with seed 0; ask the same exercises" in capsys.readouterr().err
