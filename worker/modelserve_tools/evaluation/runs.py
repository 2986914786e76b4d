"""A run of exercises against one endpoint: which model, what is asked, and what came of it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

from modelserve_tools.evaluation.cells import Cell
from modelserve_tools.evaluation.client import ChatEndpoint, open_http
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.flags import cells
from modelserve_tools.evaluation.measurement import ExerciseSource, Failure, Measurement
from modelserve_tools.evaluation.progress import Progress
from modelserve_tools.evaluation.publishing import BadInput
from modelserve_tools.evaluation.replies import ModelCard
from modelserve_tools.evaluation.report import Report
from modelserve_tools.evaluation.skills import exercise


@dataclass(frozen=True)
class Target:
    """An endpoint as the flags name it; `model_flag` is the flag that `model` came with."""

    base_url: str
    model: str | None
    model_flag: str
    api_key: str | None


@dataclass(frozen=True)
class ExerciseRun:
    """`gone`: why nothing listens any more."""

    report: Report
    interrupted: bool
    gone: str | None


async def served_model(target: Target, *, timeout_s: float) -> ModelCard:
    """The card of the model that the flag names, or of the only one. Raises BadInput and EndpointError."""
    async with open_http(target.base_url, api_key=target.api_key, timeout_s=timeout_s, connections=1) as http:
        cards = await ChatEndpoint(http).models()
    names = ", ".join(card.id for card in cards) or "none"
    chosen = [card for card in cards if target.model in (None, card.id)]
    if not chosen:
        raise BadInput(f"{target.model_flag} {target.model}: {target.base_url} serves {names}; name one of them")
    if len(chosen) > 1:
        raise BadInput(f"{target.base_url} serves {names}; choose one with {target.model_flag}")
    return chosen[0]


def run_exercises(
    target: Target, model: ModelCard, flags: argparse.Namespace, *, on_failure: Callable[[Failure], None]
) -> ExerciseRun:
    """Ask all exercises of the flags. Ctrl-C ends the run with what was answered until then."""
    progress = Progress(sys.stderr)
    measurement = Measurement(
        cells(flags),
        exercise_of=exercises_of(flags.seed),
        thinking_tokens=flags.thinking_tokens,
        on_failure=on_failure,
        on_progress=progress.show,
    )
    interrupted = False
    try:
        asyncio.run(_ask(measurement, flags, target, model))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.clear()
    report = Report(
        base_url=target.base_url,
        model=model.id,
        complete=not interrupted and measurement.gone is None,
        cells=measurement.results(seed=flags.seed),
    )
    return ExerciseRun(report, interrupted, measurement.gone)


def exercises_of(seed: int) -> ExerciseSource:
    """Exercises by cell and number, of one seed."""

    def exercise_of(cell: Cell, index: int) -> Exercise:
        return exercise(cell.skill, seed=seed, index=index, distance=cell.distance)

    return exercise_of


async def _ask(measurement: Measurement, flags: argparse.Namespace, target: Target, model: ModelCard) -> None:
    async with open_http(
        target.base_url, api_key=target.api_key, timeout_s=flags.timeout, connections=flags.concurrency
    ) as http:
        await measurement.run(ChatEndpoint(http), model=model, concurrency=flags.concurrency)
