"""The engine loop: one step is schedule, execute, take the previous step's result, update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from modelserve.errors import InvalidInput
from modelserve_worker.batch import FailedStep, ModelRunner, PendingStep, ScheduledBatch
from modelserve_worker.device_faults import device_lost
from modelserve_worker.engine.step_clock import StepClock
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import GRAMMAR_FIELD, AdapterStrength, FinishReason, Request, RequestOutput


class AdapterReader(Protocol):
    def read(self, digest: str, directory: str) -> Future[Any]:
        """Have it in host memory."""
        ...

    def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        """How large its terms are, as far as a step has measured it."""
        ...


if TYPE_CHECKING:  # the front end imports this module's names and needs no scheduler
    from modelserve_worker.grammar.compiler import CompiledGrammar, GrammarCompiler
    from modelserve_worker.scheduling.scheduler import Scheduler
    from modelserve_worker.scheduling.stats import StepEvents

MAX_FAILURES_IN_A_ROW = 3

logger = logging.getLogger(__name__)


class Engine:
    """Drives `runner` with what `scheduler` decides, one step ahead of the results where that helps. One thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        grammars: GrammarCompiler | None = None,
        clock: StepClock | None = None,
        adapters: AdapterReader | None = None,
    ) -> None:
        """`grammars`: without it, requests with a grammar are refused. `clock` left out: of real time.
        `adapters`: what reads them; without it there are none."""
        self.scheduler = scheduler
        self.runner = runner
        self._grammars, self._adapters = grammars, adapters
        self._compiling: dict[str, tuple[Request, Future[CompiledGrammar]]] = {}  # requests whose grammar is not ready
        self.steps_done = 0  # steps whose results were taken, failed ones and those that sample nothing included
        self._pending: tuple[ScheduledBatch, PendingStep] | None = None
        self._failures = 0
        self._clock = clock or StepClock()

    @property
    def has_work(self) -> bool:
        waiting = self._pending is not None or bool(self._compiling)
        return waiting or self.scheduler.has_requests or self.scheduler.prefixes.has_checks

    @property
    def has_work_in_flight(self) -> bool:
        return self._pending is not None

    def add(self, request: Request) -> None:
        """Queue a request, once its grammar is compiled if it has one. Raises InvalidInput if it could never run."""
        if request.grammar is None and request.thinking_budget is None:
            self.scheduler.add(request)
        elif self._grammars is None:
            raise InvalidInput("this engine has no tokenizer and cannot follow a grammar", field=GRAMMAR_FIELD)
        elif request.grammar is None:
            request.constraint = self._grammars.constraint(request, None)
            self.scheduler.add(request)
        else:
            self.scheduler.validate(request)
            self._compiling[request.request_id] = (request, self._grammars.compile(request.grammar))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; None if it is unknown or has ended."""
        if self._compiling.pop(request_id, None) is not None:
            return RequestOutput(request_id, (), FinishReason.ABORT)
        return self.scheduler.abort(request_id)

    def read_adapter(self, digest: str, directory: str, answer: Callable[[str | None], None]) -> None:
        """Have an adapter read beside the steps; `answer` hears in another thread of the problem, None: requests may
        ask for it."""
        if self._adapters is None:
            answer("this worker has no room for adapters: set max_loras")
            return
        reading = self._adapters.read(digest, directory)

        def ended(done: Future[Any]) -> None:
            if (error := done.exception()) is None:
                self.scheduler.adapters.add(digest, directory)
            answer(None if error is None else str(error) or type(error).__name__)

        reading.add_done_callback(ended)

    def adapter_strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        """How large the terms of an adapter are, by a step that scored a prompt with it; empty: none was measured."""
        return () if self._adapters is None else self._adapters.strengths(digest)

    def take_events(self) -> StepEvents:
        """What happened since the last call; what it did to cached prefixes is told to whoever listens."""
        self.scheduler.prefixes.tell()
        events = self.scheduler.take_events()
        events.timed_steps += self._clock.take()
        return events

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then wait for the one before it and return what that one produced.

        The launch comes first even when the earlier step is already done: a device that has nothing queued idles while
        its results are worked through. Only a long step is answered before (`SchedulerLimits.answers_first`), and what
        it says is returned before there is a next one: a prompt's first token does not wait for the second's launch.
        A runner that does not launch ahead (the CPU, where `execute` is the whole step) has its step answered at once:
        running ahead would hold every token back by one step.
        A step with constrained rows is launched as early, up to its logits; the masks of those rows are computed behind
        the earlier step's result, while the device works, and sampling is launched with them.
        Raises EngineDead when a step failed with it, or with an error that its GPU does not recover from, or
        MAX_FAILURES_IN_A_ROW steps one after the other; fewer fail their requests only.
        """
        outputs = self._add_compiled() if self._compiling else []
        oldest, self._pending = self._pending, None
        if oldest is not None and (oldest[0].trial is not None or self.scheduler.limits.answers_first(oldest[0])):
            outputs += self._take(*oldest)
            if outputs or oldest[0].trial is not None:  # whoever has come meanwhile goes before its next slice
                return outputs
            oldest = None
        if self.scheduler.prefixes.tiers:
            self.scheduler.prefixes.copied(self.runner.host_progress())
        batch = self.scheduler.schedule()
        if batch is not None:
            self._pending = (batch, self._launch(batch))
        if oldest is not None:
            outputs += self._take(*oldest)
        if self._pending is not None:
            batch, pending = self._pending
            self._pending = batch, self._constrained(batch, pending)
        if not self.runner.launches_ahead and self._pending is not None:
            oldest, self._pending = self._pending, None
            outputs += self._take(*oldest)
        return outputs

    def _add_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose grammars are ready."""
        assert self._grammars is not None
        outputs = []
        for request, future in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.request_id]
            try:
                request.constraint = self._grammars.constraint(request, future.result())
                self.scheduler.add(request)
            except Exception as error:  # of this request alone
                field = error.field if isinstance(error, InvalidInput) else None
                failed = RequestOutput(request.request_id, (), FinishReason.ERROR, error=str(error), error_field=field)
                outputs.append(failed)
        return outputs

    def _constrained(self, batch: ScheduledBatch, pending: PendingStep) -> PendingStep:
        """The step with its sampling launched, now that what its requests sampled before is known."""
        if not len(batch.constrained):
            return pending
        assert self._grammars is not None
        return pending.constrain(self._grammars.masks(self.scheduler.constraints(batch)))

    def _take(self, batch: ScheduledBatch, pending: PendingStep) -> list[RequestOutput]:
        try:
            sampled = pending.result()
        except Exception as error:
            self._clock.ended(batch, failed=True)
            return self._fail(batch, error)
        finally:
            self.steps_done += 1
        timed = self._clock.ended(batch, failed=False)
        self.scheduler.drafting.observe(timed)
        if self.scheduler.mixed_pace is not None:
            self.scheduler.mixed_pace.observe(timed)
        self._failures = 0
        return self.scheduler.update(sampled)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        self._clock.launching(batch)
        try:
            return self.runner.execute(batch)
        except Exception as error:
            return FailedStep(error)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[RequestOutput]:
        self._failures += 1
        logger.error("step %d of %d requests failed", batch.step, batch.num_requests, exc_info=error)
        if isinstance(error, EngineDead):
            raise error
        if (dead := device_lost(error)) is not None:
            raise dead from error
        text = f"the step failed: {type(error).__name__}: {error}"
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last: {text}") from error
        return self.scheduler.fail(batch.step, text)
