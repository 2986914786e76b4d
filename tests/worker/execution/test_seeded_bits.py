"""What docs/clients.md says of seeded answers on a CPU: which bits are the same under which profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exact_traffic import Exactly, differing, requests
from model_checkpoints import load_checkpoint, make_checkpoint
from paged_logits import geometry_of

from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.costs.mixed_pace import MixedPace
from modelserve_worker.step_seconds import StepSeconds

CHUNK, LONGEST = 64, 180
PROMPTS = {"one chunk": 40, "several": 150}


def engines(directory: Path, **how: object) -> Exactly:
    model = load_checkpoint(directory, dtype=torch.bfloat16, **how)
    return Exactly(model, geometry_of(model), LONGEST, 24, torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("26B-A4B")
    make_checkpoint("26B-A4B", directory, seed=4)
    return directory


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Exactly:
    return engines(checkpoint, operations=PLAIN_EXACT)


def seeded(suffix: str = "") -> list[Request]:
    sampling = SamplingParams(seed=7, max_tokens=8, temperature=1.8, logprobs=1, ignore_eos=True)
    return [
        Request(name + suffix, tuple(3 + (7 * at + length) % 250 for at in range(length)), sampling)
        for name, length in PROMPTS.items()
    ]


def pace() -> MixedPace:
    """As of a machine so slow that prompts have the fewest rows of a step beside decodes."""
    return MixedPace(StepSeconds(1.0, 1.0, 0.0, 1e-3), target=1e-3, most_rows=CHUNK)


def alone(of: Exactly) -> dict:
    return {name: said for request in seeded() for name, said in of.run([request], chunk=CHUNK).items()}


def test_exact_beside_neighbours_whose_load_cuts_the_prompt_anew(exact: Exactly) -> None:
    others = requests(6, longest_prompt=20, most_tokens=16, vocab_size=256, seed=5)
    said = exact.run([*others, *seeded()], chunk=CHUNK, order=3, pace=pace())
    assert differing(said, alone(exact)) == []


def test_exact_behind_a_prefix_that_was_cached(exact: Exactly) -> None:
    first = alone(exact)
    said = replace(exact, sequences=1).run(
        [*seeded(), *seeded(" again")], chunk=CHUNK, prefix_caching=True, pace=pace()
    )
    again = {name: said[f"{name} again"] for name in first}
    assert again["several"].cached > 0
    assert differing(again, first) == []


def test_fast_alone_and_without_a_cached_prefix(checkpoint: Path) -> None:
    """Which is all that it promises; that it keeps no more is in test_exact_profile.py."""
    fast = engines(checkpoint)
    assert differing(alone(fast), alone(fast)) == []
