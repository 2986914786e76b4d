"""A runner without a model that samples under token masks, and engines over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from small_pages import EOS, GEOMETRY

from modelserve_worker.batch import Int32Array, SampledTokens, ScheduledBatch
from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import Request, RequestOutput, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

MODEL = Path(__file__).parents[2] / "models" / "gemma4-tiny-ple"


def _highest(allowed: NDArray[np.int64]) -> int:
    return int(allowed.max())


@dataclass
class MaskedRunner:
    """Samples what `choose` makes of the tokens that a row may have, and 300 where any may. Fails steps as told."""

    launches_ahead: bool = True
    choose: Callable[[NDArray[np.int64]], int] = _highest
    events: list[tuple[str, int]] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)

    def execute(self, batch: ScheduledBatch) -> Step:
        self.events.append(("launch", batch.step))
        return Step(self, batch, np.full(int(batch.drawn.sum()), 300, dtype=np.int32))

    def shutdown(self) -> None: ...


@dataclass
class Step:
    runner: MaskedRunner
    batch: ScheduledBatch
    tokens: Int32Array
    sampled: bool = False

    def constrain(self, masks: Int32Array) -> Step:
        self.runner.events.append(("sample", self.batch.step))
        assert len(masks) == len(self.batch.constrained)
        for row, mask in zip(self.batch.constrained, masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            self.tokens[row] = self.runner.choose(allowed)
        return Step(self.runner, self.batch, self.tokens, sampled=True)

    def result(self) -> SampledTokens:
        assert self.sampled or not len(self.batch.constrained), "constrained rows are sampled with their masks"
        self.runner.events.append(("result", self.batch.step))
        if self.batch.step in self.runner.failing:
            raise RuntimeError("out of order")
        return SampledTokens(self.batch.step, self.tokens, {})


def engine_of(runner: MaskedRunner, grammars: GrammarCompiler | None) -> Engine:
    limits = SchedulerLimits(64, 64, 100, (EOS,))
    return Engine(Scheduler(limits, GEOMETRY, 64 * GEOMETRY.held_bytes(100)), runner, grammars)


def request_of(name: str, *, grammar: str | None = None, max_tokens: int = 12) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(seed=0, max_tokens=max_tokens), grammar=grammar)


def run_steps(engine: Engine, *requests: Request) -> list[list[RequestOutput]]:
    """What each step told, the requests' grammars compiled before the first."""
    for request in requests:
        if request.grammar is not None:
            assert engine._grammars is not None
            engine._grammars.compile(request.grammar).result()
        engine.add(request)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    return steps
