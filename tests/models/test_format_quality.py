"""What `format_quality.py` counts: prompts apart from answers, and exercises by their answers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_quality import FORMATS, MODELS, quality
from quantise import FORMATS as LAYOUTS
from rendering import Rendered

DATA = Path(__file__).parents[2] / "operator/modelserve/data/format_quality.json"
LIKELY = 4.0


def logits(likeliest: list[int]) -> torch.Tensor:
    return LIKELY * torch.nn.functional.one_hot(torch.tensor(likeliest), 8).float()


def test_prompts_and_answers_are_told_apart() -> None:
    asked = [Rendered(token_ids=(1, 2, 3, 4), answers=((2, 4),))] * 2
    reference = [logits([2, 3, 4])] * 2
    found = quality(asked, reference, [logits([5, 3, 4]), logits([2, 3, 6])])
    p = torch.tensor([LIKELY] + [0.0] * 7).softmax(0)
    nats = float((p[0] - p[1]) * LIKELY)
    assert found["prompts"] == {"tokens": 2, "meanKlNats": pytest.approx(nats / 2, rel=0.01), "top1Percent": 50.0}
    assert found["answers"] == {"tokens": 4, "meanKlNats": pytest.approx(nats / 4, rel=0.01), "top1Percent": 75.0}
    assert (found["right"], found["exercises"]) == (1, 2)


def test_the_figures_that_are_kept_are_of_every_format_and_model() -> None:
    kept = json.loads(DATA.read_text())["formats"]
    names = {f"{LAYOUTS[name].name}{'_mlp' if leave else ''}" for name, leave in FORMATS}
    assert kept.keys() == {"bfloat16", *names}
    assert all(tuple(of_models) == MODELS for of_models in kept.values())
    assert all(row["prompts"]["meanKlNats"] == 0 for row in kept["bfloat16"].values())
