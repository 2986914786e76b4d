"""Profile `exact`: what a request says, to the bit of each log probability, is its own affair alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exact_traffic import Exactly, Said, differing, requests
from model_checkpoints import load_checkpoint, make_checkpoint
from paged_logits import geometry_of
from true_drafter import TrueDrafter

from modelserve_worker.kernels.operations import PLAIN_EXACT

LONGEST_PROMPT, MOST_TOKENS, LONGEST, MANY = 100, 9, 112, 32
SOME = 10  # whom the tests look at


def exactly(model) -> Exactly:
    return Exactly(model, geometry_of(model), LONGEST, MANY, torch.device("cpu"))


def wanted(count: int = MANY):
    return requests(count, longest_prompt=LONGEST_PROMPT, most_tokens=MOST_TOKENS, vocab_size=256)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {variant: tmp_path_factory.mktemp(variant) for variant in ("E4B", "26B-A4B")}
    for variant, directory in made.items():
        make_checkpoint(variant, directory, seed=4)
    return made


@pytest.fixture(scope="module")
def models(checkpoints) -> dict[str, Exactly]:
    """E4B has per-layer embeddings and shared caches, 26B-A4B experts and rows of V alone."""
    found = {}
    for variant, directory in checkpoints.items():
        model = load_checkpoint(directory, operations=PLAIN_EXACT)
        found[variant] = exactly(model)
    return found


@pytest.fixture(scope="module")
def alone(models) -> dict[str, dict[str, Said]]:
    """Each of some requests in an engine of its own."""
    found: dict[str, dict[str, Said]] = {variant: {} for variant in models}
    for variant, engines in models.items():
        for request in wanted(SOME):
            found[variant] |= engines.run([request], chunk=64)
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("variant", ["E4B", "26B-A4B"])
@pytest.mark.parametrize(("chunk", "order"), [(256, None), (40, 1), (33, 2)])
def test_a_request_has_the_bits_that_it_has_alone(models, alone, variant, chunk, order) -> None:
    """Beside 31 others, in any order of arrival, at three chunk sizes."""
    assert differing(models[variant].run(wanted(), chunk=chunk, order=order), alone[variant]) == []


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B"])
def test_rows_that_another_computed_are_the_same(models, alone, variant) -> None:
    said = replace(models[variant], sequences=3).run(wanted(24), chunk=40, prefix_caching=True)
    assert differing(said, alone[variant]) == []
    assert sum(one.cached > 0 for one in said.values()) >= 2


def test_drafts_and_rows_of_others_go_together(models, alone) -> None:
    drafter = TrueDrafter(
        {name: said.tokens for name, said in alone["E4B"].items()}, num_tokens=3, right=0.5, slots=3, longest=LONGEST,
        vocab_size=256,
    )  # fmt: skip
    engine = replace(models["E4B"], sequences=3)
    said = engine.run(wanted(SOME), chunk=40, prefix_caching=True, drafter=drafter, ahead=True, preempted_every=4)
    assert differing(said, alone["E4B"]) == []
    assert any(one.cached > 0 for one in said.values())


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B"])
def test_a_preempted_request_has_them_too(models, alone, variant) -> None:
    """Its prompt is computed again as a prompt, its answer row by row as it was."""
    said = models[variant].run(wanted(SOME), chunk=40, order=3, preempted_every=5, stamps=True)
    assert differing(said, alone[variant]) == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("variant", "k", "right", "ahead"),
    [("E4B", 1, 0.5, True), ("26B-A4B", 2, 1.0, False), ("E4B", 3, 0.5, False), ("26B-A4B", 4, 0.0, True)],
)
def test_drafts_change_no_bit(models, alone, variant, k, right, ahead) -> None:
    drafter = TrueDrafter(
        {name: said.tokens for name, said in alone[variant].items()}, num_tokens=k, right=right, slots=MANY,
        longest=LONGEST, vocab_size=256,
    )  # fmt: skip
    said = models[variant].run(wanted(SOME), chunk=128, order=4, drafter=drafter, ahead=ahead, preempted_every=3)
    assert differing(said, alone[variant]) == []


def test_fast_makes_no_such_promise(checkpoints) -> None:
    """Else the tests above would show nothing."""
    model = load_checkpoint(checkpoints["E4B"])
    said, other = (exactly(model).run(wanted(SOME), chunk=chunk) for chunk in (256, 33))
    assert differing(said, other)


def test_bfloat16_rows_too(checkpoints) -> None:
    model = load_checkpoint(checkpoints["26B-A4B"], dtype=torch.bfloat16, operations=PLAIN_EXACT)
    said, other = (exactly(model).run(wanted(SOME), chunk=chunk, order=chunk) for chunk in (256, 33))
    assert differing(said, other) == []
