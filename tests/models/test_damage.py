"""The committed checkpoint shows every fault: answers go wrong, or the distribution moves far past its noise floor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from damage import LEAST_FALL, LEAST_RISE, Damage, Row, Score, Table, exercise_groups, markdown, score
from mutations import MUTATIONS
from rendering import Rendered

CHECKPOINT = Path(__file__).parent / "gemma4-tiny-keqv"
WINDOW_MUTATION, ROPE_MUTATION = MUTATIONS[0], MUTATIONS[2]


def test_every_mutation_is_caught_in_float32() -> None:
    """Recall past the window, lookbacks and one of each other short skill; docs/evaluation.md has the large table."""
    groups = exercise_groups(CHECKPOINT, distances=[150], n=8, n_short=1, seed=0)
    table = Damage(CHECKPOINT, groups, device=torch.device("cpu")).table("float32", progress=lambda _: None)
    verdicts = table.verdicts()
    assert [verdict.mutation for verdict in verdicts] == list(MUTATIONS)
    assert all(row.before.exact >= 80 for row in table.rows), markdown(table)
    assert all(verdict.caught for verdict in verdicts), markdown(table)


def test_a_score_counts_whole_answers_and_averages_over_positions() -> None:
    """Two answers of two tokens and of one; the second logits are right in every place but the first."""
    asked = [Rendered((9, 0, 1), ((1, 3),)), Rendered((9, 1), ((1, 2),))]
    right = [torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 2.0]])]
    assert score(asked, right, right) == Score(exact=100.0, divergence=0.0)
    wrong = [right[0].roll(1, dims=1) * torch.tensor([[1.0], [-1.0]]), right[1]]
    damaged = score(asked, right, wrong)
    assert damaged.exact == 50.0
    p = torch.tensor([2.0, 0.0]).softmax(0)
    assert damaged.divergence == pytest.approx(float(2 * (p[0] - p[1])) / 3, rel=1e-6)  # one of three positions


@pytest.mark.parametrize(
    ("mutation", "points", "rise", "caught"),
    [
        (WINDOW_MUTATION, -LEAST_FALL, 1.0, True),
        (WINDOW_MUTATION, 0.0, LEAST_RISE, True),
        (WINDOW_MUTATION, -LEAST_FALL + 0.1, LEAST_RISE - 0.1, False),
        (ROPE_MUTATION, -LEAST_FALL, 1.0, True),
        (ROPE_MUTATION, 0.0, 1e6, False),  # only where global layers may mask it does divergence count
    ],
)
def test_a_verdict_takes_the_worst_group(mutation, points, rise, caught) -> None:
    def row(group: str, points: float, rise: float) -> Row:
        return Row(mutation.name, group, 10, Score(100.0, 1e-9), Score(100.0 + points, rise * 1e-9), floor=1e-9)

    (verdict,) = Table("float32", (row("short skills", 0.0, 1.0), row("recall", points, rise))).verdicts()
    assert verdict.caught is caught
