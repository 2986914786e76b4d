"""Loops at the end of an answer: found at the token that completes them, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve_worker.text.repetition import RepetitionDetector, RepetitionLimits, ends_in_a_loop


def _plainly(tokens: list[int], limits: RepetitionLimits) -> bool:
    return any(
        len(tokens) >= size * limits.rounds and tokens[-size * limits.rounds :] == tokens[-size:] * limits.rounds
        for size in range(limits.least_size, limits.most_size + 1)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    most=st.integers(1, 6),
    least=st.integers(1, 6),
    rounds=st.integers(2, 5),
)
def test_a_loop_is_found_where_the_end_is_its_rounds(tokens: list[int], most: int, least: int, rounds: int) -> None:
    limits = RepetitionLimits(most, least, rounds)
    detector, seen = RepetitionDetector(limits), list[int]()
    for token in tokens:
        detector.push(token)
        seen.append(token)
        assert detector.found == _plainly(seen, limits)


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([*range(300)], False),
        ([0] * 63, False),
        ([0] * 64, True),
        ([5, *[1, 2, 3] * 30], True),
        ([1, 2, 3] * 30 + [9], False),
        ([*range(64)] * 4, True),
        ([*range(64)] * 3, False),
        ([*range(65)] * 4, False),
    ],
)
def test_what_counts_as_an_answer_that_went_round_in_circles(tokens: list[int], loops: bool) -> None:
    assert ends_in_a_loop(tokens) is loops
