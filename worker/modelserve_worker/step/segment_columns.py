"""Columns of a step's segments on the host, and what follows from them for rows."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from modelserve_worker.batch import ScheduledBatch, row_places

Ints = NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)


def of_rows(batch: ScheduledBatch, values: NDArray[Number]) -> NDArray[Number]:
    """What each segment has, for each of its rows; that of a lone segment is left to broadcast."""
    return values if len(values) == 1 else np.repeat(values, batch.lengths)


def row_by_row(slots: Ints, starts: Ints, lengths: Ints, firsts: Ints) -> tuple[Ints, ...]:
    """Columns of segments, one for each row of these."""
    segments, offsets = row_places(lengths)
    return slots[segments], starts[segments] + offsets, np.ones_like(segments), firsts[segments] + offsets


def together(keys: Ints, capacity: int) -> list[slice]:
    """Runs of consecutive chunks whose keys together fit in `capacity`; a chunk alone always does."""
    found, first, total = [], 0, 0
    for index, count in enumerate(keys.tolist()):
        if index > first and total + count > capacity:
            found.append(slice(first, index))
            first, total = index, 0
        total += count
    return [*found, slice(first, len(keys))]
