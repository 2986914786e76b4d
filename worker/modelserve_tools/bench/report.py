"""What a run found: the document that --json writes, and the table that people read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from modelserve_tools.bench.figures import Distribution, Figures, TurnFigures
from modelserve_tools.bench.goodput import Goodput
from modelserve_tools.evaluation.columns import Row, columns

_HEADINGS = (
    "LOAD", "OK", "FAILED", "IN", "OUT", "REQ/S", "OUT TOK/S", "ALL TOK/S", "TTFT MS mean/p50/p99",
    "TPOT MS mean/p50/p99", "ITL MS p50/p99/max", "E2E MS p50/p99",
)  # fmt: skip
_TURN_HEADINGS = ("LOAD", "TURN", "OK", "IN", "CACHED", "TTFT MS mean/p50/p99")
_GOODPUT_HEADINGS = ("LOAD", "SENT", "GOOD", "GOOD/S", "TTFT KEPT", "TPOT KEPT")
_MUCH_LATER_MS = 10.0


class Report(BaseModel):
    """A whole run. `command` is the command line, `models` and `version` are what the server says of itself.

    `started` is in UTC, ISO 8601. `found` says in words what was asked otherwise than by default, since the endpoint
    takes it so. `loads` are in the order in which they ran.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["modelserve-bench/1"] = "modelserve-bench/1"
    command: list[str]
    started: str
    base_url: str
    model: str
    seed: int
    complete: bool
    models: Any = None
    version: Any = None
    found: tuple[str, ...] = ()
    loads: tuple[Figures, ...]


def report_table(report: Report) -> str:
    """A line per load, and under them what the figures do not say: failures, and what makes a figure doubtful."""
    lines = columns(_HEADINGS, [Row(_cells(load)) for load in report.loads], text_columns=1)
    notes = [f"the endpoint was asked first: {found}" for found in report.found]
    notes += [f"{_name(load)}: {note}" for load in report.loads for note in _notes(load)]
    if goodput := [(load, load.goodput) for load in report.loads if load.goodput is not None]:
        rows = [Row(_goodput_cells(load, found)) for load, found in goodput]
        lines += ["", _goals(goodput[0][1]), *columns(_GOODPUT_HEADINGS, rows, text_columns=1)]
    if any(load.turns for load in report.loads):
        rows = [Row(_turn_cells(load, turn)) for load in report.loads for turn in load.turns]
        lines += ["", *columns(_TURN_HEADINGS, rows, text_columns=1)]
    head = f"{report.model} at {report.base_url}, seed {report.seed}"
    head += "" if report.complete else ", stopped before its end"
    return "\n".join([*notes, *([""] if notes else []), head, "", *lines])


def _name(load: Figures) -> str:
    return f"c={load.concurrency}" if load.rate is None else f"{load.rate:g}/s"


def _cells(load: Figures) -> tuple[str, ...]:
    return (
        _name(load), str(load.ok), str(load.failed), _count(load.input_tokens_mean), _count(load.output_tokens_mean),
        f"{load.requests_per_s:.3g}", f"{load.output_tokens_per_s:.1f}", f"{load.total_tokens_per_s:.1f}",
        _ms(load.ttft_ms, "mean", "p50", "p99"), _ms(load.tpot_ms, "mean", "p50", "p99"),
        _ms(load.itl_ms, "p50", "p99", "max"), _ms(load.e2e_ms, "p50", "p99"),
    )  # fmt: skip


def _turn_cells(load: Figures, turn: TurnFigures) -> tuple[str, ...]:
    return (
        _name(load), str(turn.turn), str(turn.ok), _count(turn.input_tokens_mean), _count(turn.cached_tokens_mean),
        _ms(turn.ttft_ms, "mean", "p50", "p99"),
    )  # fmt: skip


def _goals(goodput: Goodput) -> str:
    wanted = (("TTFT", goodput.goals.ttft_ms), ("TPOT", goodput.goals.tpot_ms))
    return "good: " + " and ".join(f"{name} at most {most:g} ms" for name, most in wanted if most is not None)


def _goodput_cells(load: Figures, goodput: Goodput) -> tuple[str, ...]:
    kept = (goodput.ttft_kept, goodput.tpot_kept)
    shares = ["-" if not goodput.sent else f"{count / goodput.sent:.1%}" for count in (goodput.good, *kept)]
    return (_name(load), str(goodput.sent), shares[0], f"{goodput.good_requests_per_s:.3g}", *shares[1:])


def _count(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:g}"


def _ms(distribution: Distribution | None, *names: str) -> str:
    """Three digits at least; a hundredth of a millisecond below ten."""
    if distribution is None:
        return "-"
    values = [getattr(distribution, name) for name in names]
    return "/".join(f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values)


def _notes(load: Figures) -> list[str]:
    notes = [f"{fault.count} x {fault.kind}, first: {fault.first}" for fault in load.faults]
    notes += [f"warm-up: {fault.count} x {fault.kind}, first: {fault.first}" for fault in load.warmup_faults]
    if load.unfinished:
        notes.append(f"{load.unfinished} of {load.requests} requests were not finished")
    if load.ok and not load.counted_by_usage:
        notes.append("the server sends no usage: tokens are counted by events")
    if load.tokens_per_event is not None and load.tokens_per_event > 1.005:
        notes.append(f"{load.tokens_per_event:.2f} tokens an event: ITL is between events, TPOT per token")
    if load.driver_is_busy:
        notes.append(f"this driver took {load.driver_cpu_share:.0%} of a core: its own delays are in the figures")
    if load.late_ms is not None and load.late_ms.p99 > _MUCH_LATER_MS:
        notes.append(f"requests were sent up to {load.late_ms.max:.0f} ms after their planned arrival")
    return notes
