"""Asks the exercises of a run with bounded concurrency and keeps what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from modelserve_tools.evaluation.cells import Cell, fingerprint, words_and_marks
from modelserve_tools.evaluation.client import (
    ChatEndpoint,
    ContextTooLong,
    EndpointError,
    EndpointGone,
    chat_body,
)
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.marking import fault
from modelserve_tools.evaluation.replies import ModelCard, Reply
from modelserve_tools.evaluation.report import ERROR, NOT_ASKED, RIGHT, WRONG, CellResult

ExerciseSource = Callable[[Cell, int], Exercise]


@dataclass(frozen=True)
class Failure:
    """A reply that was not the answer. `reason` says what differs."""

    cell: Cell
    index: int
    exercise: Exercise
    reply: Reply
    reason: str


@dataclass
class Tally:
    """What is known of one cell so far. A cell that is skipped while questions are on their way takes no answers."""

    cell: Cell
    outcomes: list[str] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    fingerprint: str | None = None
    first_error: str | None = None
    skipped: str | None = None

    def __post_init__(self) -> None:
        self.outcomes = [NOT_ASKED] * self.cell.n

    def marked(self, index: int, *, right: bool, milliseconds: float) -> None:
        if self.skipped is None:
            self.outcomes[index] = RIGHT if right else WRONG
            self.milliseconds.append(milliseconds)

    def failed(self, index: int, error: str) -> None:
        if self.skipped is None:
            self.outcomes[index] = ERROR
            self.first_error = self.first_error or error

    def skip(self, reason: str) -> None:
        """Drop the whole cell: those of its prompts that fit are the shorter ones, no sample of it."""
        self.skipped = reason
        self.first_error = None
        self.outcomes.clear()
        self.milliseconds.clear()


class Measurement:
    """A run over `cells`. It may be stopped at any time; `results` then has what is done.

    `thinking_tokens` is the room for thoughts, as in chat_body.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        exercise_of: ExerciseSource,
        thinking_tokens: int,
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._tallies = [Tally(cell) for cell in cells]
        self._exercise_of = exercise_of
        self._thinking_tokens = thinking_tokens
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._done = 0
        self._total = sum(cell.n for cell in cells)
        self.gone: str | None = None  # why the run ended early: nothing listens at the address any more

    async def run(self, endpoint: ChatEndpoint, *, model: ModelCard, concurrency: int) -> None:
        """Ask everything, `concurrency` exercises at a time. Failures of the endpoint end up in the results."""
        work = ((tally, index) for tally in self._tallies for index in range(tally.cell.n))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._take(work, endpoint, model))

    def results(self, *, seed: int) -> tuple[CellResult, ...]:
        return tuple(
            CellResult(
                skill=tally.cell.skill,
                distance=tally.cell.distance,
                seed=seed,
                fingerprint=tally.fingerprint,
                outcomes="".join(tally.outcomes),
                median_ms=round(median(tally.milliseconds), 3) if tally.milliseconds else None,
                first_error=tally.first_error,
                skipped=tally.skipped,
            )
            for tally in self._tallies
        )

    async def _take(self, work: Iterator[tuple[Tally, int]], endpoint: ChatEndpoint, model: ModelCard) -> None:
        for tally, index in work:
            if self.gone is not None:
                return
            if tally.skipped is None:
                await self._ask(tally, index, endpoint, model)
            self._done += 1
            self._on_progress(self._done, self._total)

    async def _ask(self, tally: Tally, index: int, endpoint: ChatEndpoint, model: ModelCard) -> None:
        try:
            exercise = self._exercise_of(tally.cell, index)
        except ValueError as error:  # the skill cannot bridge this distance
            tally.skip(str(error))
            return
        if index == 0:
            tally.fingerprint = fingerprint(exercise)
        body = chat_body(exercise, model=model.id, thinking_tokens=self._thinking_tokens)
        needed = words_and_marks(exercise) + body["max_tokens"]
        if model.max_model_len is not None and needed > model.max_model_len:
            tally.skip(f"needs at least {needed} tokens, the server has {model.max_model_len}")
            return
        try:
            reply = await endpoint.complete(body)
        except ContextTooLong as error:
            tally.skip(str(error))
        except EndpointGone as error:
            self.gone = str(error)
        except EndpointError as error:
            tally.failed(index, str(error))
        else:
            reason = fault(exercise, reply)
            tally.marked(index, right=reason is None, milliseconds=reply.milliseconds)
            if reason is not None:
                self._on_failure(Failure(tally.cell, index, exercise, reply, reason))
