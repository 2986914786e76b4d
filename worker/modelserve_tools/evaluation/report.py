"""What a run found: the document that --json writes and --compare reads, and the table that people read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from modelserve.errors import first_fault
from modelserve_tools.evaluation.columns import Row, columns
from modelserve_tools.evaluation.intervals import wilson_interval

RIGHT, WRONG, ERROR, NOT_ASKED = "1", "0", "e", "-"


class ReportError(Exception):
    """A file that should be a report is not, or two reports cannot be compared."""


class CellResult(BaseModel):
    """One skill at one distance.

    Character i of `outcomes` is exercise i: 1 right, 0 wrong, e no reply to mark, - not asked. `fingerprint` is that of
    exercise 0, None before that was made. A skipped cell has no outcomes. Times are in milliseconds, shares in per
    cent, intervals at 95 %.
    """

    model_config = ConfigDict(frozen=True)

    skill: str
    distance: int | None
    seed: int
    fingerprint: str | None
    outcomes: str = Field(pattern="^[01e-]*$")
    median_ms: float | None
    first_error: str | None = None
    skipped: str | None = None

    @property
    def name(self) -> str:
        return self.skill if self.distance is None else f"{self.skill} at {self.distance}"

    @computed_field  # type: ignore[prop-decorator]  # mypy does not know that pydantic puts decorators on properties
    @property
    def answered(self) -> int:
        """Replies that were marked; errors are not among them."""
        return self.outcomes.count(RIGHT) + self.outcomes.count(WRONG)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def errors(self) -> int:
        return self.outcomes.count(ERROR)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exact_match(self) -> float | None:
        """Per cent of the replies that were marked."""
        return 100 * self.outcomes.count(RIGHT) / self.answered if self.answered else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's, in per cent."""
        if not self.answered:
            return None
        low, high = wilson_interval(self.outcomes.count(RIGHT), self.answered)
        return 100 * low, 100 * high


class Report(BaseModel):
    """A whole run. Fields that are computed are written for other programs and ignored when read."""

    model_config = ConfigDict(frozen=True)

    format: Literal["modelserve-eval/1"] = "modelserve-eval/1"
    base_url: str
    model: str
    complete: bool
    cells: tuple[CellResult, ...]

    def below(self, percent: float) -> list[str]:
        """Why the run does not reach `percent` everywhere. A cell that was not measured does not reach it either."""
        faults = []
        for cell in self.cells:
            if cell.exact_match is None:
                faults.append(f"{cell.name}: not measured")
            elif cell.exact_match < percent:
                faults.append(f"{cell.name}: {cell.exact_match:.1f} %")
        return faults


def read_report(path: Path) -> Report:
    """Raises ReportError."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; name a file that --json wrote") from error
    except ValidationError as error:
        field, message = first_fault(error)
        raise ReportError(f"{path}: {field or 'document'}: {message}; name a file that --json wrote") from error


def report_table(report: Report) -> str:
    """A line per cell, and under them the first error of each cell that has errors."""
    headings = ("SKILL", "DISTANCE", "N", "EXACT %", "95 % INTERVAL", "ERRORS", "MEDIAN MS")
    lines = columns(headings, [_row(cell) for cell in report.cells], text_columns=1)
    notes = [f"{cell.name}: first error: {cell.first_error}" for cell in report.cells if cell.first_error]
    head = f"{report.model} at {report.base_url}" + ("" if report.complete else ", stopped before its end")
    return "\n".join([head, "", *lines, *(["", *notes] if notes else [])])


def _row(cell: CellResult) -> Row:
    where = ("-" if cell.distance is None else str(cell.distance),)
    if cell.skipped is not None:
        return Row((cell.skill, *where), note=f"skipped: {cell.skipped}")
    share: Sequence[str] = ("-", "-")
    if cell.exact_match is not None and cell.interval is not None:
        low, high = cell.interval
        share = (f"{cell.exact_match:.1f}", f"{low:.1f} to {high:.1f}")
    median = "-" if cell.median_ms is None else f"{cell.median_ms:.1f}"
    return Row((cell.skill, *where, str(cell.answered), *share, str(cell.errors), median))
