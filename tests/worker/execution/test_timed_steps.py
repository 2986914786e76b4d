"""How often a start on a CPU repeats the steps that it times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.timed_steps import timed_steps

FEW = {"most_rows": 64, "longest": 8192, "weights_bytes": 1 << 20}  # the most repeats: 8


class TimedRunner:
    """Each step takes the next of `noise` times a second, and a tenth of it a row."""

    def __init__(self, noise: Iterator[float]) -> None:
        self.now, self.noise = 0.0, noise
        self.asked: Counter[tuple[int, int]] = Counter()  # by rows and the tokens before them

    def profile(self, steps: Sequence[ScheduledBatch]) -> None:
        (step,) = steps
        (rows,), (start,) = step.lengths.tolist(), step.starts.tolist()
        self.asked[rows, start] += 1
        self.now += (1 + rows / 10) * next(self.noise)


def timed(noise: Iterator[float], **changed: int) -> tuple[TimedRunner, Any]:
    runner = TimedRunner(noise)
    found = timed_steps(cast(GPUModelRunner, runner), clock=lambda: runner.now, **(FEW | changed))
    return runner, found


def endless(*noise: float) -> Iterator[float]:
    while True:
        yield from noise


def test_what_came_twice_is_believed() -> None:
    runner, found = timed(endless(1.0, 1.05))
    assert runner.asked == dict.fromkeys(((8, 0), (64, 0), (8, 4096), (64, 4096)), 2)
    assert (found.constant, found.row, found.key, found.pair) == pytest.approx((1.0, 0.1, 0.0, 0.0))


def test_the_shortest_is_waited_for_a_second_time() -> None:
    runner, found = timed(endless(3.0, 1.0, 2.0, 1.0))
    assert set(runner.asked.values()) == {4}
    assert (found.constant, found.row) == pytest.approx((1.0, 0.1))


def test_on_a_machine_that_never_rests_the_shortest_of_eight_counts() -> None:
    runner, found = timed(2.0**-each for _ in range(4) for each in range(8))
    assert set(runner.asked.values()) == {8}
    assert found.row == pytest.approx(0.1 / 128)


@pytest.mark.parametrize(("weights_bytes", "repeats"), [(64 << 20, 8), (1 << 30, 3), ((1 << 30) + 1, 1)])
def test_ranks_repeat_alike_whatever_each_of_them_sees(weights_bytes: int, repeats: int) -> None:
    runner, _ = timed(endless(1.0), weights_bytes=weights_bytes, ranks=2)
    assert set(runner.asked.values()) == {repeats}
