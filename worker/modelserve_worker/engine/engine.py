"""The engine loop: one step is schedule, execute, take the previous step's result, update."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelserve_worker.batch import ModelRunner, PendingStep, SampledTokens, ScheduledBatch
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import RequestOutput

if TYPE_CHECKING:  # the front end imports this module's names and needs no scheduler
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
    """Drives `runner` with what `scheduler` decides, one step ahead of the results where that helps. One thread."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.steps_done = 0  # steps whose results were taken, failed ones and those that sample nothing included
        self._pending: tuple[ScheduledBatch, PendingStep] | None = None
        self._failures = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or self._pending is not None

    @property
    def has_work_in_flight(self) -> bool:
        return self._pending is not None

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then wait for the one before it and return what that one produced.

        The launch comes first even when the earlier step is already done: a device that has nothing queued idles while
        its results are worked through. A runner that does not launch ahead (the CPU, where `execute` is the whole
        step) has its step answered at once: running ahead would hold every token back by one step.
        Raises EngineDead when a step failed with it, or MAX_FAILURES_IN_A_ROW steps one after the other; fewer fail
        their requests only.
        """
        oldest, self._pending = self._pending, None
        batch = self.scheduler.schedule()
        if batch is not None:
            self._pending = (batch, self._launch(batch))
        if not self.runner.launches_ahead:
            oldest, self._pending = self._pending, None
        return self._take(*oldest) if oldest is not None else []

    def _take(self, batch: ScheduledBatch, pending: PendingStep) -> list[RequestOutput]:
        try:
            sampled = pending.result()
        except Exception as error:
            return self._fail(batch, error)
        finally:
            self.steps_done += 1
        self._failures = 0
        return self.scheduler.update(sampled)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        try:
            return self.runner.execute(batch)
        except Exception as error:
            return _FailedLaunch(error)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        self._failures += 1
        logger.error("step %d of %d requests failed", batch.step, batch.num_requests, exc_info=error)
        if isinstance(error, EngineDead):
            raise error
        text = f"the step failed: {type(error).__name__}: {error}"
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last: {text}") from error
        return self.scheduler.fail(batch.step, text)
