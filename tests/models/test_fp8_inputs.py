"""Rows with outliers: prompts, whose inputs become e4m3, say what decodes say, whose inputs keep four bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fp8_inputs import PLANTED_CHANNELS, by_power, plant
from paged_logits import Forced, Traffic, geometry_of, replay
from quantise import quantise
from teacher_forcing import EngineLogits, checkpoint_renderer, divergence, render_cell
from torch import Tensor

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.kernels.products.fp8_linear import e4m3_precision
from modelserve_worker.layers.stored.fp8 import Fp8Matrix

MODEL = Path(__file__).parent / "gemma4-tiny-keqv"
PLANTED, TOO_LARGE = 13, 19  # powers of two; 10^4 is what large models have in a few channels
MOST_NATS = 1e-6  # mean KL between both ways: a few times what either is from the model; 0.04 of it at 2^13
Rounded = Callable[[Tensor], Tensor]


def engine(directory: Path) -> EngineLogits:
    return EngineLogits(directory, dtype=torch.float32, device=torch.device("cpu"))


def said(directory: Path, rounded: Rounded) -> list[Tensor]:
    """Logits of answers to three questions, each of which is one chunk with its answer."""
    asked = render_cell(checkpoint_renderer(MODEL), Cell("facts", None, 3), seed=7)
    requests = tuple(Forced(r.token_ids, len(r.token_ids) - 1, kept_from=r.prompt_tokens - 1) for r in asked)
    built = engine(directory)
    with mock.patch.object(Fp8Matrix, "_rounded", lambda _, x: rounded(x)):
        return replay(built.model, Traffic(requests), geometry=geometry_of(built.model), audited=False).logits


def nats(one: list[Tensor], other: list[Tensor]) -> float:
    return float(torch.cat([divergence(*pair) for pair in zip(one, other, strict=True)]).mean())


@pytest.mark.parametrize("far", [False, True], ids=["as large as models have them", "the others are lost"])
def test_both_ways_of_rounding_say_nearly_the_same_beside_planted_outliers(tmp_path: Path, far: bool) -> None:
    planted, made = tmp_path / "planted", tmp_path / "made"
    planted.mkdir()
    plant(MODEL, planted, TOO_LARGE if far else PLANTED)
    quantise(planted, made, "fp8_channel")
    apart = nats(said(made, e4m3_precision), said(made, by_power))
    assert apart > 1.0 if far else apart <= MOST_NATS, f"{apart:.2e} nats"


@pytest.mark.parametrize("exponent", [0, 7, 13, 20])
def test_elements_within_two_to_the_13_of_the_largest_are_the_same_both_ways(exponent: int) -> None:
    """The others are at most 2^-17 of the row's largest apart, and those below 2^-19 are gone."""
    x = torch.randn((64, 512), generator=torch.Generator().manual_seed(exponent))
    x[:, PLANTED_CHANNELS] *= 2.0**exponent
    in_place, scaled = e4m3_precision(x), by_power(x)
    largest = x.abs().amax(1, keepdim=True)
    near = x.abs() >= largest * 2.0**-13
    assert torch.equal(in_place[near], scaled[near])
    assert ((in_place - scaled).abs() <= largest * 2.0**-17).all()
    assert (scaled[x.abs() < largest * 2.0**-19] == 0).all()
    assert (in_place != 0).all()
