"""Where a long recording is cut into sounds that a model hears one by one: in the middle of its quietest moments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelserve.model.audio import HOP, RATE

_LOOKED_AT = 5 * RATE  # samples before the longest sound's end
_MOMENT = 10  # frames of 10 ms: a gap between words, and not one within
_LEFT = RATE  # samples that are left to the last sound at least


def cuts(samples: NDArray[np.float32], longest: int) -> list[int]:
    """Where sounds of at most `longest` samples end, the last of them with the recording [n]."""
    ends, first = [], 0
    while len(samples) - first > longest:
        last = min(first + longest, len(samples) - _LEFT)
        first = max(first + 1, last - _LOOKED_AT) + quietest(samples[max(first + 1, last - _LOOKED_AT) : last])
        ends.append(first)
    return [*ends, len(samples)]


def quietest(samples: NDArray[np.float32]) -> int:
    """The middle of the moment that has the least energy, the last of several; the end of what is shorter than one."""
    count = len(samples) // HOP
    if count <= _MOMENT:
        return len(samples)
    energies = np.square(samples[: count * HOP].astype(np.float64)).reshape(count, HOP).sum(axis=1)
    sums = np.convolve(energies, np.ones(_MOMENT), mode="valid")
    at = len(sums) - 1 - int(np.argmin(sums[::-1]))
    return (at + _MOMENT // 2) * HOP
