"""The engine loop: one step is schedule, execute, take the previous step's result, update."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from modelserve_worker.batch import ModelRunner, PendingStep, SampledTokens, ScheduledBatch
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import RequestOutput
from modelserve_worker.scheduling.scheduler import Scheduler

MAX_FAILURES_IN_A_ROW = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _FailedLaunch:
    """A step that the runner refused at once: it fails in its turn, after the steps launched before it."""

    error: Exception

    def done(self) -> bool:
        return True

    def result(self) -> SampledTokens:
        raise self.error


class Engine:
    """Drives `runner` with what `scheduler` decides, one step ahead of the results. One thread."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._pending: tuple[ScheduledBatch, PendingStep] | None = None
        self._failures = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or self._pending is not None

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then wait for the one before it and return what that one produced.

        A step that is already done is answered first, and nothing is launched: running ahead of a device that waits for
        us gains nothing, and on the CPU, where a launch is the whole step, it would hold every token back by one step.
        Raises EngineDead when a step failed with it, or MAX_FAILURES_IN_A_ROW steps one after the other; fewer fail
        their requests only.
        """
        previous, self._pending = self._pending, None
        if previous is not None and previous[1].done():
            return self._take(*previous)
        batch = self.scheduler.schedule()
        self._pending = (batch, self._launch(batch)) if batch else None
        return self._take(*previous) if previous is not None else []

    def _take(self, batch: ScheduledBatch, pending: PendingStep) -> list[RequestOutput]:
        try:
            sampled = pending.result()
        except Exception as error:
            return self._fail(batch, error)
        self._failures = 0
        return self.scheduler.update(sampled)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        try:
            return self.runner.execute(batch)
        except Exception as error:
            return _FailedLaunch(error)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        self._failures += 1
        logger.error("step %d of %d requests failed", batch.step, len(batch.requests), exc_info=error)
        if isinstance(error, EngineDead):
            raise error
        text = f"the step failed: {type(error).__name__}: {error}"
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last: {text}") from error
        return self.scheduler.fail(batch.step, text)
