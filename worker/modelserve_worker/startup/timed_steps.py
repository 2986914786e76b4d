"""Chunks that a rank on a CPU times at its start, since its rates are on no list."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.profile_steps import timed_batch
from modelserve_worker.step_seconds import StepSeconds

_ROWS = (8, 64)  # of a chunk: one that mostly reads the weights, and one that multiplies
_CONTEXT = 4096  # in front of it
# The most repeats, of which the shortest counts: noise only adds. By bytes of weights: with few, 3 missed by half at
# times, and with many, steps take long enough that little comes between.
_REPEATS = ((64 << 20, 8), (1 << 30, 3))
_AGAIN = 1.1  # times the shortest: what came a second time need not be tried a third


def timed_steps(
    runner: GPUModelRunner,
    *,
    most_rows: int,
    longest: int,
    weights_bytes: int,
    ranks: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> StepSeconds | None:
    """What steps take; None where they are so short that nobody waits for one: of `most_rows`, at most `longest`.

    The runner stands over a cache of one page per kind. All `ranks` time the same steps as often, since they compute
    together; one that is alone ends with what came twice. `clock` tells seconds.
    """
    few, many = _ROWS[0], min(_ROWS[1], most_rows, longest)
    if many <= few:
        return None
    repeats = next((count for most, count in _REPEATS if weights_bytes <= most), 1)

    def seconds(rows: int, start: int) -> float:
        taken: list[float] = []
        while len(taken) < repeats and (ranks > 1 or not _came_again(taken)):
            began = clock()
            runner.profile([timed_batch(start=start, tokens=rows)])
            taken.append(clock() - began)
        return min(taken)

    return StepSeconds.fitted(seconds, rows=(few, many), context=min(_CONTEXT, longest - many))


def _came_again(taken: Sequence[float]) -> bool:
    """Whether the shortest time is no accident."""
    shortest, *second = sorted(taken)[:2] or [0.0]
    return bool(second) and second[0] <= _AGAIN * shortest
