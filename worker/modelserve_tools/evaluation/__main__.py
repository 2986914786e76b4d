"""`modelserve-eval`: measure a model's skills over its OpenAI API, or compare two measurements."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from modelserve_tools.evaluation.cells import Cell
from modelserve_tools.evaluation.client import ChatEndpoint, EndpointError, open_http
from modelserve_tools.evaluation.comparison import compare, comparison_table
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.failures import failure_line
from modelserve_tools.evaluation.flags import cells, parse
from modelserve_tools.evaluation.measurement import Failure, Measurement
from modelserve_tools.evaluation.progress import Progress
from modelserve_tools.evaluation.publishing import STDOUT, BadInput, publish, read_api_key, require_writable
from modelserve_tools.evaluation.replies import ModelCard
from modelserve_tools.evaluation.report import Report, ReportError, read_report, report_table
from modelserve_tools.evaluation.skills import exercise

EXIT_BELOW, EXIT_BAD_INPUT, EXIT_ENDPOINT, EXIT_INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    flags = parse(argv)
    try:
        return _compare(flags) if flags.compare else _measure(flags)
    except (BadInput, ReportError) as error:
        return _complain(error, EXIT_BAD_INPUT)
    except EndpointError as error:
        return _complain(error, EXIT_ENDPOINT)
    except KeyboardInterrupt:
        return _complain("interrupted before the first question", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader went away; nothing is left to say, and the exit must not try to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _compare(flags: argparse.Namespace) -> int:
    first, second = flags.compare
    comparison = compare(read_report(first), read_report(second), names=(str(first), str(second)))
    publish(flags.json, comparison, table=comparison_table(comparison))
    return 0


def _measure(flags: argparse.Namespace) -> int:
    api_key = read_api_key(flags.api_key_env, os.environ)
    if flags.json not in (None, STDOUT):
        require_writable(Path(flags.json))
    model = asyncio.run(_served_model(flags, api_key))
    progress = Progress(sys.stderr)
    interrupted = False
    with ExitStack() as files:
        lines = None
        if flags.failures:
            require_writable(flags.failures)
            lines = files.enter_context(flags.failures.open("w"))

        def write_failure(failure: Failure) -> None:
            if lines is not None:
                lines.write(failure_line(failure, seed=flags.seed))

        def exercise_of(cell: Cell, index: int) -> Exercise:
            return exercise(cell.skill, seed=flags.seed, index=index, distance=cell.distance)

        measurement = Measurement(
            cells(flags),
            exercise_of=exercise_of,
            thinking_tokens=flags.thinking_tokens,
            on_failure=write_failure,
            on_progress=progress.show,
        )
        try:
            asyncio.run(_ask(measurement, flags, model, api_key))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.clear()
    report = Report(
        base_url=flags.base_url,
        model=model.id,
        complete=not interrupted and measurement.gone is None,
        cells=measurement.results(seed=flags.seed),
    )
    publish(flags.json, report, table=report_table(report))
    return _verdict(report, flags.at_least, interrupted=interrupted, gone=measurement.gone)


async def _served_model(flags: argparse.Namespace, api_key: str | None) -> ModelCard:
    """The card of the model that --model names, or of the only one. Raises BadInput and EndpointError."""
    async with open_http(flags.base_url, api_key=api_key, timeout_s=flags.timeout, connections=1) as http:
        cards = await ChatEndpoint(http).models()
    names = ", ".join(card.id for card in cards) or "none"
    chosen = [card for card in cards if flags.model in (None, card.id)]
    if not chosen:
        raise BadInput(f"--model {flags.model}: {flags.base_url} serves {names}; name one of them")
    if len(chosen) > 1:
        raise BadInput(f"{flags.base_url} serves {names}; choose one with --model")
    return chosen[0]


async def _ask(measurement: Measurement, flags: argparse.Namespace, model: ModelCard, api_key: str | None) -> None:
    async with open_http(
        flags.base_url, api_key=api_key, timeout_s=flags.timeout, connections=flags.concurrency
    ) as http:
        await measurement.run(ChatEndpoint(http), model=model, concurrency=flags.concurrency)


def _verdict(report: Report, at_least: float | None, *, interrupted: bool, gone: str | None) -> int:
    if interrupted:
        return _complain("interrupted; the figures are of what was answered until then", EXIT_INTERRUPTED)
    if gone is not None:
        return _complain(gone, EXIT_ENDPOINT)
    errors = sum(cell.errors for cell in report.cells)
    if errors:
        asked = errors + sum(cell.answered for cell in report.cells)
        return _complain(f"{errors} of {asked} questions got no answer that could be marked", EXIT_ENDPOINT)
    below = [] if at_least is None else report.below(at_least)
    if below:
        return _complain(f"below {at_least:g} %: {'; '.join(below)}", EXIT_BELOW)
    return 0


def _complain(what: object, code: int) -> int:
    print(f"modelserve-eval: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
