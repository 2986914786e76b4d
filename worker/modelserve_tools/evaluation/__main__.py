"""`modelserve-eval`: measure a model's skills over its OpenAI API, alone or beside a reference, or compare two runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from modelserve_tools.evaluation.against import AgainstReport, against_table, missing_texts, token_scores
from modelserve_tools.evaluation.client import EndpointError
from modelserve_tools.evaluation.comparison import compare, comparison_table
from modelserve_tools.evaluation.failures import failure_line
from modelserve_tools.evaluation.flags import parse
from modelserve_tools.evaluation.measurement import Failure
from modelserve_tools.evaluation.publishing import STDOUT, BadInput, publish, read_api_key, require_writable
from modelserve_tools.evaluation.reference import RecordingHead, RecordingWriter
from modelserve_tools.evaluation.report import Report, ReportError, read_report, report_table
from modelserve_tools.evaluation.runs import ExerciseRun, Target, run_exercises, served_model
from modelserve_tools.evaluation.score_runs import compare_texts, open_recording, record
from modelserve_tools.evaluation.scoring import CellScores, TokenizersDiffer

EXIT_BELOW, EXIT_BAD_INPUT, EXIT_ENDPOINT, EXIT_INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    flags = parse(argv)
    try:
        if flags.compare:
            return _compare(flags)
        return _against(flags) if flags.against else _measure(flags)
    except (BadInput, ReportError, TokenizersDiffer) as error:
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
    target = _served_target(flags)
    with ExitStack() as files:
        _require_writable_outputs(flags)
        model = asyncio.run(served_model(target, timeout_s=flags.timeout))
        scored: list[CellScores] = []
        if flags.record:
            head = RecordingHead(base_url=target.base_url, model=model.id, seed=flags.seed)
            writer = files.enter_context(RecordingWriter(flags.record, head))
            scored = asyncio.run(record(writer, target, model, flags))
        run = run_exercises(target, model, flags, on_failure=_failure_lines(flags, files))
        if flags.record and run.report.complete:
            writer.end(run.report)
    table = "\n".join([report_table(run.report), *missing_texts(scored)])
    publish(flags.json, run.report, table=table)
    return _verdict([run], at_least=flags.at_least, unscored=sum(each.errors for each in scored))


def _against(flags: argparse.Namespace) -> int:
    served = _served_target(flags)
    _require_writable_outputs(flags)
    recording = open_recording(flags.against, seed=flags.seed) if isinstance(flags.against, Path) else None
    timeout_s = flags.timeout
    model = asyncio.run(served_model(served, timeout_s=timeout_s))
    with ExitStack() as files:
        on_failure = _failure_lines(flags, files)
        if recording is not None:
            scored = asyncio.run(compare_texts(served, model, recording, flags))
            reference = ExerciseRun(recording.report, interrupted=False, gone=None)
        else:
            key = read_api_key(flags.against_api_key_env, os.environ, flag="--against-api-key-env")
            other = Target(flags.against, flags.against_model, "--against-model", key)
            card = asyncio.run(served_model(other, timeout_s=timeout_s))
            scored = asyncio.run(compare_texts(served, model, (other, card), flags))
            reference = run_exercises(other, card, flags, on_failure=lambda _: None)
        run = reference if reference.interrupted else run_exercises(served, model, flags, on_failure=on_failure)
    report = AgainstReport(
        scores=token_scores(scored),
        left=missing_texts(scored),
        errors=sum(each.errors for each in scored),
        reference=reference.report,
        served=run.report,
        exercises=compare(reference.report, run.report, names=(_name(reference.report), _name(run.report))),
    )
    publish(flags.json, report, table=against_table(report))
    return _verdict(
        [reference, run], at_least=flags.at_least, unscored=report.errors, faults=_kl_faults(report, flags.kl_at_most)
    )


def _served_target(flags: argparse.Namespace) -> Target:
    return Target(flags.base_url, flags.model, "--model", read_api_key(flags.api_key_env, os.environ))


def _require_writable_outputs(flags: argparse.Namespace) -> None:
    for path in (flags.json, flags.failures, flags.record):
        if path not in (None, STDOUT):
            require_writable(Path(path))


def _failure_lines(flags: argparse.Namespace, files: ExitStack) -> Callable[[Failure], None]:
    """Writes wrong answers where --failures says, if it does."""
    lines = files.enter_context(flags.failures.open("w")) if flags.failures else None

    def write_failure(failure: Failure) -> None:
        if lines is not None:
            lines.write(failure_line(failure, seed=flags.seed))

    return write_failure


def _name(report: Report) -> str:
    return f"{report.model} at {report.base_url}"


def _kl_faults(report: AgainstReport, at_most: float | None) -> list[str]:
    """Why the divergence is not within the gate; tokens that were not scored do not hold it."""
    if at_most is None or (report.answers_kl is not None and report.answers_kl <= at_most):
        return []
    measured = "not measured" if report.answers_kl is None else f"{report.answers_kl:.3g}"
    return [f"mean KL of answers above {at_most:g} nats: {measured}"]


def _verdict(runs: Sequence[ExerciseRun], *, at_least: float | None, unscored: int, faults: Sequence[str] = ()) -> int:
    """Gates are of the last run, the served endpoint's."""
    if any(run.interrupted for run in runs):
        return _complain("interrupted; the figures are of what was answered until then", EXIT_INTERRUPTED)
    for run in runs:
        if run.gone is not None:
            return _complain(run.gone, EXIT_ENDPOINT)
        cells = run.report.cells
        errors = sum(cell.errors for cell in cells)
        if errors:
            asked = errors + sum(cell.answered for cell in cells)
            return _complain(f"{errors} of {asked} questions got no answer that could be marked", EXIT_ENDPOINT)
    if unscored:
        return _complain(f"{unscored} texts were not scored", EXIT_ENDPOINT)
    below = [] if at_least is None else runs[-1].report.below(at_least)
    gates = [*([f"below {at_least:g} %: {'; '.join(below)}"] if below else []), *faults]
    return _complain("; ".join(gates), EXIT_BELOW) if gates else 0


def _complain(what: object, code: int) -> int:
    print(f"modelserve-eval: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
