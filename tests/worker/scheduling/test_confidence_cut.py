"""What a head that says how likely each draft is right could bring: its arithmetic, with simulated confidence."""

from __future__ import annotations

import numpy as np
import pytest

from bench.host.confidence_cut import rates, verified


def test_a_cut_verifies_what_is_worth_its_time() -> None:
    seconds = np.array([10.0, 11.0, 12.0, 13.0, 14.0])
    chances = np.array([[0.9, 0.8], [0.5, 0.05]])
    assert verified(chances, seconds, tokens_per_s=0.4).tolist() == [2, 1]
    assert verified(chances, seconds, tokens_per_s=0.85).tolist() == [1, 0]
    assert verified(chances, seconds, tokens_per_s=0.01).tolist() == [2, 2]


@pytest.mark.parametrize(("requests", "concentration", "least", "most"), [
    (1, 1.0, 0.99, 1.01),  # rows cost nothing where few are served: there is nothing to cut
    (32, 1.0, 1.08, 1.16),  # drafts that are nearly sure, or nearly not
    (32, 10.0, 1.0, 1.06),  # drafts that are alike: what is learned of each place says as much
])  # fmt: skip
def test_what_it_brings_depends_on_how_far_proposals_differ(
    requests: int, concentration: float, least: float, most: float
) -> None:
    mean, sure = rates(requests, concentration, steps=60)
    assert least <= sure / mean <= most
