"""Growth of tests is told from a slower machine and from noise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import spent

TABLE = {f"tests/core/test_{number}.py": 0.5 + number for number in range(60)}  # 1,800 s: 54 may be added
LARGE = "tests/core/test_50.py"


def _found(*reports: dict[str, float]) -> list[str]:
    return spent.problems(TABLE, reports)


def _report(path: Path, cases: dict[str, list[float]]) -> Path:
    lines = [
        f'<testcase classname="c" name="n" file="{file}" time="{seconds}"/>'
        for file, times in cases.items()
        for seconds in times
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    return path


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0, 7.0])
def test_a_faster_or_slower_machine_is_no_growth(factor: float) -> None:
    assert _found({file: seconds * factor for file, seconds in TABLE.items()}) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_growth(seed: int) -> None:
    rng = random.Random(seed)
    assert _found({file: seconds * rng.uniform(0.6, 1.7) + rng.uniform(0, 2) for file, seconds in TABLE.items()}) == []


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_one_file_that_takes_ten_times_as_long_is_found_on_every_machine(factor: float) -> None:
    measured = {file: seconds * factor for file, seconds in TABLE.items()}
    found = _found(measured | {LARGE: 10 * measured[LARGE]})
    assert found[0].startswith("tests take 404 s more than .ci/spent.tsv allows, which is 54 s")
    assert LARGE in found[1]
    assert "50.5 s in the table" in found[1]
    assert "--record" in found[-1]


def test_a_new_file_counts_whole_and_a_small_one_passes() -> None:
    whole = sum(TABLE.values())
    (_, row, *_) = _found(TABLE | {"tests/core/test_new.py": 0.05 * whole})
    assert "tests/core/test_new.py (new)" in row
    assert _found(TABLE | {"tests/core/test_new.py": 0.02 * whole}) == []


def test_growth_of_several_files_is_added_up_over_reports() -> None:
    first = TABLE | {"tests/core/test_new.py": 30.0}
    assert _found(first) == []
    assert _found(first, {"tests/e2e/test_new.py": 30.0}) != []


def test_each_report_has_its_own_pace() -> None:
    """Tests that wait take the same time on a machine on which others take half of it."""
    waiting = dict(list(TABLE.items())[40:])
    computing = {file: seconds / 2.5 for file, seconds in list(TABLE.items())[:40]}
    assert _found(waiting, computing) == []
    assert _found(waiting | computing) != []


def test_a_report_of_some_files_is_no_growth() -> None:
    assert _found({LARGE: 400.0}) == [], "one file alone says nothing: it may be the machine"
    assert _found({}) == []


def test_reports_are_recorded_row_by_row_and_rows_of_files_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    table = tmp_path / "spent.tsv"
    table.write_text("tests/gone/test_gone.py\t9.0\ntests/test_docs.py\t7.0\ntests/test_house_rules.py\t8.0\n")
    report = _report(tmp_path / "report.xml", {"tests/test_docs.py": [0.25, 0.5]})
    assert spent.main(["--record", f"--table={table}", str(report)]) == 0
    assert table.read_text() == "tests/test_docs.py\t0.8\ntests/test_house_rules.py\t8.0\n"


def test_the_exit_status_says_whether_tests_have_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "spent.tsv"
    table.write_text(spent.write_table(TABLE))
    cases = {file: [seconds] for file, seconds in TABLE.items()}
    assert spent.main([f"--table={table}", str(_report(tmp_path / "same.xml", cases))]) == 0
    grown = _report(tmp_path / "grown.xml", cases | {LARGE: [200.0, 300.0]})
    assert spent.main([f"--table={table}", str(grown)]) == 1
    assert f"{LARGE} (50.5 s in the table)" in capsys.readouterr().out
