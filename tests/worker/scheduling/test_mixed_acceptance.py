"""Requests whose drafts are right unequally often, beside each other and from the middle of an answer on."""

from __future__ import annotations

import numpy as np
import pytest
from mixed_acceptance import Chances, Traffic, fixed_rates, planned_costs, switched_rate

OFTEN, SELDOM, NEVER = 0.86, 0.3, 0.0


def _by_request(requests: int, most: int, assistant: tuple[float, ...], block: tuple[float, ...]) -> list[Chances]:
    """[requests, most] of each drafter: chances of the first request, the second, and so on round."""
    return [np.array([[of[i % len(of)]] * most for i in range(requests)]) for of in (assistant, block)]


def _unequal(requests: int, most: int) -> Traffic:
    return Traffic([_by_request(requests, most, (0.8, SELDOM, NEVER), (OFTEN, SELDOM, NEVER))])


def _changing(requests: int, most: int) -> Traffic:
    later = _by_request(requests, most, (NEVER, 0.8, SELDOM), (NEVER, OFTEN, SELDOM))
    return Traffic([*_unequal(requests, most).chances, later])


@pytest.mark.parametrize(("requests", "steps"), [(16, 900), (64, 500)])
def test_who_is_drafted_for_beats_any_choice_that_is_the_same_for_all(requests: int, steps: int) -> None:
    costs, most = planned_costs(requests)
    traffic = _unequal(requests, most)
    assert switched_rate(traffic, costs, most, steps=steps) >= 1.05 * max(fixed_rates(traffic, costs, most).values())


@pytest.mark.parametrize(("requests", "steps"), [(1, 900), (16, 900), (128, 400)])
def test_answers_that_change_in_their_middle_cost_no_more_than_probes(requests: int, steps: int) -> None:
    """Never below 0.98 of the rate without drafts, and near the best choice that is the same for all; in crowds whose
    drafts are mostly wrong that is none."""
    costs, most = planned_costs(requests)
    traffic = _changing(requests, most)
    fixed, switched = fixed_rates(traffic, costs, most), switched_rate(traffic, costs, most, steps=steps)
    assert switched >= 0.98 * fixed["none"]
    assert switched >= 0.95 * max(fixed.values())
