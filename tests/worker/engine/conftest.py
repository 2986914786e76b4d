"""A runner without a model, and engines over it that end with their test."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from modelserve.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, PageSpec
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.engine.async_engine import AsyncEngine
from modelserve_worker.engine.engine import Engine
from modelserve_worker.request import SampledToken
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

EOS = 1
GEOMETRY = CacheGeometry(
    global_page=PageSpec(LayerKind.GLOBAL, 4, (1,), (), 16),
    sliding_page=PageSpec(LayerKind.SLIDING, 2, (0,), (), 8),
    window=5,
    dtype=KVCacheDtype.BFLOAT16,
    layout=KVCacheLayout.KV,
)


@dataclass
class CountingRunner:
    """Samples position + 100 for every request. `launch_errors` and `result_errors` are raised by step, in turn."""

    step_seconds: float = 0.0
    launch_errors: dict[int, Exception] = field(default_factory=dict)
    result_errors: dict[int, Exception] = field(default_factory=dict)
    batches: list[ScheduledBatch] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    shut_down: bool = False
    synchronous: bool = False  # a launch is the whole step, as on the CPU
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def execute(self, batch: ScheduledBatch) -> _Pending:
        self.batches.append(batch)
        if batch.step in self.launch_errors:
            raise self.launch_errors[batch.step]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _Pending(self, batch)

    def shutdown(self) -> None:
        self.shut_down = True


@dataclass
class _Pending:
    runner: CountingRunner
    batch: ScheduledBatch

    def done(self) -> bool:
        return self.runner.synchronous

    def result(self) -> SampledTokens:
        self.runner.gate.wait(timeout=30)
        time.sleep(self.runner.step_seconds)
        self.runner.in_flight -= 1
        if error := self.runner.result_errors.get(self.batch.step):
            raise error
        return SampledTokens(
            self.batch.step, {r.request_id: SampledToken(r.end + 100) for r in self.batch.requests if r.samples}
        )


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


@pytest.fixture
def build_engine(runner: CountingRunner) -> Callable[..., Engine]:
    def build(*, budget: int = 64, seqs: int = 64, requests_of_100: int = 64) -> Engine:
        limits = SchedulerLimits(budget, seqs, 100, (EOS,))
        return Engine(Scheduler(limits, GEOMETRY, requests_of_100 * GEOMETRY.held_bytes(100)), runner)

    return build


@pytest.fixture
async def build_async_engine(build_engine: Callable[..., Engine]) -> AsyncIterator[Callable[..., AsyncEngine]]:
    engines: list[AsyncEngine] = []

    def build(**settings: int) -> AsyncEngine:
        engines.append(AsyncEngine(build_engine(**settings), plan_report={"maxModelLen": 100}))
        return engines[-1]

    yield build
    for engine in engines:
        await engine.shutdown()
