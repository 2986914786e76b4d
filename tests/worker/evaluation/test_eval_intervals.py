"""Intervals against published values, and against the coverage that they promise."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve_tools.evaluation.intervals import mcnemar_p, paired_interval, wilson_interval


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Table I of R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_has_the_published_values(right: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors_its_complement(counts: tuple[int, int]) -> None:
    right, n = counts
    low, high = wilson_interval(right, n)
    assert 0 <= low <= right / n <= high <= 1
    assert wilson_interval(n - right, n) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("right", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_counts_that_are_no_share(right: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{right} right of {n}; needs"):
        wilson_interval(right, n)


def test_the_paired_interval_by_hand() -> None:
    # n 98, gained 3, lost 7: shares 4/100 and 8/100, variance (0.12 - 0.0016) / 100, half 1.959964 * 0.0344093
    assert paired_interval(3, 7, 98) == pytest.approx((-0.107441, 0.027441), abs=1e-6)


@pytest.mark.parametrize(("up", "down"), [(0.05, 0.03), (0.2, 0.2), (0.3, 0.05)])
def test_the_paired_interval_covers_the_true_difference(up: float, down: float) -> None:
    """All outcomes of 60 pairs, weighted with their probability: 95 %, or more where pairs rarely differ."""
    n, covered = 60, 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            low, high = paired_interval(gained, lost, n)
            if low <= up - down <= high:
                ways = comb(n, gained) * comb(n - gained, lost)
                covered += ways * up**gained * down**lost * (1 - up - down) ** (n - gained - lost)
    assert 0.94 < covered < 0.99


@pytest.mark.parametrize(("gained", "lost", "n"), [(0, 0, 0), (-1, 0, 5), (3, 3, 5)])
def test_the_paired_interval_refuses_counts_that_do_not_fit(gained: int, lost: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{gained} gained and {lost} lost of {n}; needs"):
        paired_interval(gained, lost, n)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (1, 7, 2 * 9 / 256), (7, 1, 2 * 9 / 256), (0, 10, 2 / 1024), (5, 5, 1.0), (3, 5, 2 * 93 / 256)],
)
def test_mcnemar_is_the_binomial_tail(gained: int, lost: int, p: float) -> None:
    assert mcnemar_p(gained, lost) == pytest.approx(p, rel=1e-12)


def test_mcnemar_takes_thousands_of_exercises() -> None:
    assert 0 < mcnemar_p(900, 1100) < 1e-5
