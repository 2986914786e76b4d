"""Measured steps: no idle time in them, no step that failed, no outlier, and nothing said of too few."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modelserve.measured_speed import MAX_MEASURED
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.measured_speed import KEPT_STEPS, LEAST_STEPS, MeasuredSpeed
from modelserve_worker.engine.step_clock import StepClock
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.stats import TimedStep


class _Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Time:
    """Goes on by what a runner's step takes, and between steps by hand."""
    return _Time()


def _request(name: str, prompt: int = 4, max_tokens: int = 5) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens))


def _run(engine: Engine, clock: _Time, runner, *, step_s: float) -> list[TimedStep]:
    """Each result comes `step_s` after the one before, or after its launch."""
    timed = []
    while engine.has_work:
        results = sum(what == "result" for what, _ in runner.events)
        clock.now += step_s if runner.events and len(runner.events) > 2 * results else 0.0
        engine.step()
        timed += engine.take_events().timed_steps
    return timed


def test_a_step_is_timed_from_the_end_of_the_one_before_and_idle_time_is_in_none(
    build_engine: Callable[..., Engine], runner, clock: _Time
) -> None:
    engine = build_engine(budget=64, clock=StepClock(clock))
    engine.scheduler.add(_request("a"))
    first = _run(engine, clock, runner, step_s=0.25)
    clock.now += 1000.0
    engine.scheduler.add(_request("b", prompt=6))
    second = _run(engine, clock, runner, step_s=0.5)
    assert [step.kind for step in first] == ["Prefill", *["Decode"] * 4]
    assert [step.seconds for step in first] == [0.25] * 5
    assert [step.seconds for step in second] == [0.5] * 5
    assert first[0] == TimedStep(0.25, 0, 0.0, 4, 2.0)
    assert [step.context for step in first[1:]] == [4, 5, 6, 7]


def test_what_shares_a_step_is_counted_apart(build_engine: Callable[..., Engine], runner, clock: _Time) -> None:
    engine = build_engine(budget=8, clock=StepClock(clock))
    engine.scheduler.add(_request("a", prompt=2, max_tokens=8))
    engine.step()
    engine.scheduler.add(_request("b", prompt=20, max_tokens=1))
    timed = _run(engine, clock, runner, step_s=0.25)
    mixed = [step for step in timed if step.kind == "Mixed"]
    assert [(step.decodes, step.prompt_rows, step.prompt_context) for step in mixed] == [
        (1, 7, 3.5), (1, 7, 10.5), (1, 6, 17.0),
    ]  # fmt: skip
    assert all(step.decodes + step.prompt_rows <= 8 for step in timed)


def test_a_failed_step_is_not_timed_and_the_next_one_begins_at_its_end(
    build_engine: Callable[..., Engine], runner, clock: _Time
) -> None:
    runner.result_errors = {1: ValueError("x")}
    engine = build_engine(clock=StepClock(clock))
    engine.scheduler.add(_request("broken"))
    engine.step()
    clock.now += 30.0
    (output,) = engine.step()
    assert output.error is not None
    assert engine.take_events().timed_steps == []
    engine.scheduler.add(_request("well", max_tokens=3))
    timed = _run(engine, clock, runner, step_s=0.25)
    assert [step.seconds for step in timed] == [0.25] * 4, "one of the broken request's steps was launched behind it"


def _decodes(count: int, seconds: float, *, batch: int = 8, context: float = 100.0) -> list[TimedStep]:
    return [TimedStep(seconds, batch, context, 0, 0.0)] * count


def test_means_are_of_recent_steps_of_a_size_without_outliers() -> None:
    speed = MeasuredSpeed()
    speed.add(_decodes(KEPT_STEPS, 9.0))  # what it once took
    speed.add(_decodes(KEPT_STEPS - 2, 0.02) + _decodes(1, 2.5) + _decodes(1, 1.5))
    speed.add(_decodes(LEAST_STEPS - 1, 0.5, batch=32))
    (found,) = speed.report()
    assert (found.kind, found.steps, found.milliseconds) == ("Decode", KEPT_STEPS - 2, 20.0)
    assert (found.requests, found.context_tokens, found.prompt_tokens, found.prompt_context) == (8, 100, 0, 0)
    speed.add(_decodes(1, 0.5, batch=33))
    first, second = speed.report()
    assert first.requests == pytest.approx(32.05, abs=0.01)
    assert first.milliseconds == 500, "what took the most time comes first"
    assert second == found


def test_contexts_are_means_over_requests_and_rows() -> None:
    speed = MeasuredSpeed()
    speed.add([TimedStep(0.1, 1, 1000.0, 500, 40.0), TimedStep(0.1, 3, 3000.0, 502, 80.0)] * 10)
    (found,) = speed.report()
    assert (found.kind, found.requests, found.context_tokens) == ("Mixed", 2, 2500)
    assert (found.prompt_tokens, found.prompt_context) == (501, pytest.approx(60, abs=0.1))


def test_the_report_is_bounded_and_a_clock_that_stands_still_says_nothing() -> None:
    speed = MeasuredSpeed()
    for size in range(12):
        speed.add(_decodes(LEAST_STEPS, 0.01, batch=1 << size))
        speed.add([TimedStep(0.01, 0, 0.0, 1 << size, 5.0)] * LEAST_STEPS)
    assert len(speed.report()) == MAX_MEASURED
    still = MeasuredSpeed()
    still.add(_decodes(LEAST_STEPS, 0.0))
    assert still.report() == []
