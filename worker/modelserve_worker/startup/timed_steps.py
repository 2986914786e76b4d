"""Chunks that a rank on a CPU times at its start, since its rates are on no list."""

from __future__ import annotations

import time

from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.profile_steps import timed_batch
from modelserve_worker.step_seconds import StepSeconds

_ROWS = (8, 64)  # of a chunk: one that mostly reads the weights, and one that multiplies
_CONTEXT = 4096  # in front of it
# Repeats, of which the shortest counts: noise only adds. By bytes of weights, since all ranks must repeat alike: with
# few, 3 missed by half at times, and with many, steps take long enough that little comes between.
_REPEATS = ((64 << 20, 8), (1 << 30, 3))


def timed_steps(
    runner: GPUModelRunner,
    *,
    most_rows: int,
    longest: int,
    weights_bytes: int,
) -> StepSeconds | None:
    """What steps take; None where they are so short that nobody waits for one: of `most_rows`, at most `longest`.

    The runner stands over a cache of one page per kind. All ranks time the same steps, since they compute together.
    """
    few, many = _ROWS[0], min(_ROWS[1], most_rows, longest)
    if many <= few:
        return None
    repeats = next((count for most, count in _REPEATS if weights_bytes <= most), 1)

    def seconds(rows: int, start: int) -> float:
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            runner.profile([timed_batch(start=start, tokens=rows)])
            taken.append(time.perf_counter() - began)
        return min(taken)

    return StepSeconds.fitted(seconds, rows=(few, many), context=min(_CONTEXT, longest - many))
