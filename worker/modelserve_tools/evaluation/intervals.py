"""How sure a share of right answers is, and a difference between two runs over the same exercises."""

from __future__ import annotations

from math import comb, sqrt
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)  # two-sided 95 %


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of the share `right / n`, both ends in 0..1.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927. Unlike the textbook
    interval it stays inside 0..1 and keeps its width at 0 % and 100 %. Raises ValueError unless 0 <= right <= n, n > 0.
    """
    if not 0 <= right <= n or n == 0:
        raise ValueError(f"{right} right of {n}; needs 0 <= right <= n and n > 0")
    share = right / n
    scale = 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / scale
    half = _Z / scale * sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    # At the ends the interval begins exactly there, which the rounding of the formula misses by 1e-17.
    return 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half


def paired_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a difference of shares over the same n exercises, both ends in -1..1.

    `gained` were wrong in the first run and right in the second, `lost` the other way round. One exercise more is
    counted in each of these two groups: D. G. Bonett and R. M. Price, "Adjusted Wald confidence interval for a
    difference of binomial proportions based on paired data", 2012. Raises ValueError unless the counts are at least 0
    and fit into n > 0.
    """
    if min(gained, lost) < 0 or gained + lost > n or n == 0:
        raise ValueError(f"{gained} gained and {lost} lost of {n}; needs counts >= 0 that fit into n > 0")
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def mcnemar_p(gained: int, lost: int) -> float:
    """McNemar's exact test: how likely a split at least this uneven is when either direction has the same chance.

    Two-sided: twice the binomial tail of min(gained, lost) of gained + lost fair throws, at most 1.
    """
    discordant = gained + lost
    tail = sum(comb(discordant, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << discordant))
