"""A runner without a model, and engines over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from small_pages import EOS, GEOMETRY

from modelserve_worker.batch import NOT_A_NUMBER, SampledTokens, ScheduledBatch
from modelserve_worker.engine.engine import Engine
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler


@dataclass
class CountingRunner:
    """Samples position + 100 for every request. `launch_errors` and `result_errors` are raised by step, in turn."""

    launches_ahead: bool = True
    launch_errors: dict[int, Exception] = field(default_factory=dict)
    result_errors: dict[int, Exception] = field(default_factory=dict)
    nan_prompts: set[int] = field(default_factory=set)  # lengths of prompts whose logits are not numbers
    batches: list[ScheduledBatch] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)  # ("launch" or "result", step), in order

    def execute(self, batch: ScheduledBatch) -> _Pending:
        self.batches.append(batch)
        self.events.append(("launch", batch.step))
        if batch.step in self.launch_errors:
            raise self.launch_errors[batch.step]
        return _Pending(self, batch)

    @property
    def most_in_flight(self) -> int:
        in_flight = most = 0
        for what, _ in self.events:
            in_flight += 1 if what == "launch" else -1
            most = max(most, in_flight)
        return most

    def shutdown(self) -> None:
        self.events.append(("shutdown", 0))


@dataclass
class _Pending:
    runner: CountingRunner
    batch: ScheduledBatch

    def result(self) -> SampledTokens:
        self.runner.events.append(("result", self.batch.step))
        if error := self.runner.result_errors.get(self.batch.step):
            raise error
        ends = (self.batch.starts + self.batch.lengths)[self.batch.drawn > 0]
        token_ids = np.where(np.isin(ends, list(self.runner.nan_prompts)), NOT_A_NUMBER, ends + 100)
        return SampledTokens(self.batch.step, token_ids.astype(np.int32), {})


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


@pytest.fixture
def build_engine(runner: CountingRunner) -> Callable[..., Engine]:
    def build(*, budget: int = 64, seqs: int = 64, requests_of_100: int = 64, mixed: int = 512, **more: Any) -> Engine:
        limits = SchedulerLimits(budget, seqs, 100, (EOS,), mixed)
        return Engine(Scheduler(limits, GEOMETRY, requests_of_100 * GEOMETRY.held_bytes(100)), runner, **more)

    return build
