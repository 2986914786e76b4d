"""The tables as people read them, the document as programs read it, and two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelserve_tools.evaluation.comparison import compare, comparison_table
from modelserve_tools.evaluation.report import CellResult, Report, ReportError, read_report, report_table


def _cell(skill: str, outcomes: str, **fields: Any) -> CellResult:
    given = {"distance": None, "seed": 0, "fingerprint": "f00d", "median_ms": 12.345} | fields
    return CellResult(skill=skill, outcomes=outcomes, **given)


def _report(*cells: CellResult, complete: bool = True) -> Report:
    return Report(base_url="http://127.0.0.1:8000/v1", model="tiny", complete=complete, cells=cells)


MEASURED = _report(
    _cell("arithmetic", "1" * 49 + "0"),
    _cell("recall", "1" * 46 + "ee--", distance=1000, median_ms=1234.56, first_error="HTTP 500: overheated"),
    _cell("recall", "", distance=16000, median_ms=None, skipped="needs at least 16200 tokens, the server has 2048"),
    _cell("needle", "ee", distance=10, median_ms=None, first_error="HTTP 502: gateway"),
)


def test_the_table() -> None:
    assert report_table(MEASURED) == (
        "tiny at http://127.0.0.1:8000/v1\n"
        "\n"
        "SKILL       DISTANCE   N  EXACT %  95 % INTERVAL  ERRORS  MEDIAN MS\n"
        "arithmetic         -  50     98.0   89.5 to 99.6       0       12.3\n"
        "recall          1000  46    100.0  92.3 to 100.0       2     1234.6\n"
        "recall         16000  skipped: needs at least 16200 tokens, the server has 2048\n"
        "needle            10   0        -              -       2          -\n"
        "\n"
        "recall at 1000: first error: HTTP 500: overheated\n"
        "needle at 10: first error: HTTP 502: gateway"
    )


def test_a_run_that_was_stopped_says_so() -> None:
    assert report_table(_report(complete=False)).startswith(
        "tiny at http://127.0.0.1:8000/v1, stopped before its end\n"
    )


def test_the_document_has_every_outcome_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(MEASURED.model_dump_json())
    document = json.loads(path.read_text())
    assert document["format"] == "modelserve-eval/1"
    assert document["cells"][1] == {
        "skill": "recall", "distance": 1000, "seed": 0, "fingerprint": "f00d", "outcomes": "1" * 46 + "ee--",
        "median_ms": 1234.56, "first_error": "HTTP 500: overheated", "skipped": None,
        "answered": 46, "errors": 2, "exact_match": 100.0, "interval": [pytest.approx(92.2927, abs=1e-4), 100.0],
    }  # fmt: skip
    assert read_report(path) == MEASURED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("{", "document: Invalid JSON"),
        ('{"format": "other"}', "format: Input should be 'modelserve-eval/1'"),
        (MEASURED.model_dump_json().replace("ee--", "ee-x"), "cells.1.outcomes: String should match"),
    ],
)
def test_a_file_that_is_no_report_is_named_with_its_fault(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReportError) as raised:
        read_report(path)
    assert str(raised.value).startswith(f"{path}: {reason}")
    assert str(raised.value).endswith("; name a file that --json wrote")


def test_a_gate_lists_what_is_below_and_what_was_not_measured() -> None:
    assert MEASURED.below(98.0) == ["recall at 16000: not measured", "needle at 10: not measured"]
    assert MEASURED.below(98.1)[0] == "arithmetic: 98.0 %"


def test_runs_are_compared_exercise_by_exercise() -> None:
    first = _report(
        _cell("recall", "1" * 90 + "0" * 10, distance=1000),
        _cell("recall", "11e", distance=10),
        _cell("facts", "1111"),
        _cell("sorting", "", skipped="too long"),
        _cell("copying", "----", fingerprint=None),
    )
    second = _report(
        _cell("facts", "1111--"),
        _cell("recall", "1e0", distance=10),
        _cell("recall", "0" * 8 + "1" * 84 + "0" * 8, distance=1000),
        _cell("sorting", "1"),
        _cell("copying", "1"),
        _cell("needle", "1", distance=10),
    )
    comparison = compare(first, second, names=("a.json", "b.json"))
    assert comparison_table(comparison) == (
        "A: a.json\n"
        "B: b.json\n"
        "\n"
        "SKILL   DISTANCE  PAIRS    A %    B %  B - A   95 % INTERVAL  GAINED  LOST      P\n"
        "recall      1000    100   90.0   84.0   -6.0   -12.4 to +0.7       2     8  0.109\n"
        "recall        10      1  100.0  100.0   +0.0  -92.4 to +92.4       0     0      1\n"
        "facts          -      4  100.0  100.0   +0.0  -46.2 to +46.2       0     0      1\n"
        "\n"
        "not measured by both: sorting, copying, needle at 10"
    )
    assert comparison.cells[0].p == pytest.approx(2 * (1 + 10 + 45) / 1024)


@pytest.mark.parametrize(
    ("fields", "reason"), [({"seed": 1}, "seeds 0 and 1"), ({"fingerprint": "beef"}, "another version of the skill")]
)
def test_runs_over_different_exercises_are_not_compared(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReportError, match=rf"facts: the runs asked different exercises \({reason}\); run both again"):
        compare(_report(_cell("facts", "11")), _report(_cell("facts", "11", **fields)), names=("a", "b"))
