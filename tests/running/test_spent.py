"""Growth of tests is told from a slower machine and from noise."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import spent

TABLE = {f"tests/core/test_{number}.py::test_it": 0.5 + number for number in range(60)}  # 1,800 s: 54 may be added
LARGE = "tests/core/test_50.py::test_it"
WHOLE = sum(TABLE.values())


def _growth(*reports: dict[str, float], gone: tuple[str, ...] = ()) -> spent.Growth:
    return spent.growth(TABLE, reports, lambda row: row not in gone)


def _found(*reports: dict[str, float], gone: tuple[str, ...] = ()) -> list[str]:
    return spent.problems(TABLE, _growth(*reports, gone=gone))


def _report(path: Path, cases: dict[str, list[float]]) -> Path:
    lines = [
        f'<testcase classname="c" name="{test}[{number}]" file="{file}" time="{seconds}"/>'
        for (file, _, test), times in ((row.partition("::"), times) for row, times in cases.items())
        for number, seconds in enumerate(times)
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    return path


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7, 7.0])
def test_a_faster_or_slower_machine_is_no_growth(factor: float) -> None:
    measured = {row: seconds * factor for row, seconds in TABLE.items()}
    assert _found(measured) == []
    assert abs(_growth(measured).together) < 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_growth(seed: int) -> None:
    rng = random.Random(seed)
    assert _found({row: seconds * rng.uniform(0.6, 1.7) + rng.uniform(0, 2) for row, seconds in TABLE.items()}) == []


def test_a_program_beside_a_third_of_the_tests_is_no_growth() -> None:
    measured = {row: seconds * (1.9 if number % 3 == 0 else 1.0) for number, (row, seconds) in enumerate(TABLE.items())}
    assert _found(measured) == []
    assert _growth(measured).together > 0.2 * WHOLE


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_one_test_that_takes_ten_times_as_long_is_found_on_every_machine(factor: float) -> None:
    measured = {row: seconds * factor for row, seconds in TABLE.items()}
    found = _found(measured | {LARGE: 10 * measured[LARGE]})
    assert found[0].startswith("tests take 404 s more than .ci/spent.tsv allows, which is 54 s")
    assert LARGE in found[1]
    assert "50.5 s in the table" in found[1]
    assert "--record" in found[-1]


@pytest.mark.parametrize("file", ["tests/core/test_new.py", "tests/core/test_50.py"])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_a_new_test_counts_whole_in_a_file_old_or_new(file: str, factor: float) -> None:
    measured = {row: seconds * factor for row, seconds in TABLE.items()}
    (_, row, *_) = _found(measured | {f"{file}::test_new": 0.035 * WHOLE * factor})
    assert f"{file}::test_new (new)" in row
    assert _found(measured | {f"{file}::test_new": 0.02 * WHOLE * factor}) == []


def test_many_small_new_tests_of_a_file_count_together() -> None:
    small = {f"tests/core/test_new.py::test_{number}": 2.0 for number in range(40)}
    (_, row, *_) = _found(TABLE | small)
    assert "80.0 s  tests/core/test_new.py (new)" in row


def test_a_test_of_about_a_second_is_not_new_where_it_takes_two() -> None:
    table = TABLE | {"tests/core/test_50.py": 9.0}
    measured = TABLE | {f"tests/core/test_50.py::test_small_{number}": 2.0 for number in range(8)}
    assert spent.growth(table, [measured], lambda row: True).rows == {}


def test_a_test_that_is_gone_pays_for_a_new_one_and_a_moved_one_is_none() -> None:
    left = {row: seconds for row, seconds in TABLE.items() if row != LARGE}
    new = {"tests/core/test_new.py::test_it": 90.0}
    assert _found(left | new) != [], "a report without a test says not that it is gone"
    assert _found(left | new, gone=(LARGE,)) == []
    assert _growth(left | {"tests/other/test_50.py::test_it": TABLE[LARGE]}, gone=(LARGE,)).together == 0


def test_growth_of_several_rows_is_added_up_over_reports() -> None:
    first = TABLE | {"tests/core/test_new.py::test_it": 30.0}
    assert _found(first) == []
    assert _found(first, {"tests/e2e/test_new.py::test_it": 30.0}) != []


def test_each_report_has_its_own_pace() -> None:
    """Tests that wait take the same time on a machine on which others take half of it."""
    waiting = dict(list(TABLE.items())[40:])
    computing = {row: seconds / 2.5 for row, seconds in list(TABLE.items())[:40]}
    assert _found(waiting, computing) == []
    assert _found(waiting | computing) != []


def test_a_report_of_some_tests_is_no_growth() -> None:
    assert _found({LARGE: 400.0}) == [], "one test alone says nothing: it may be the machine"
    assert _found({}) == []


def test_all_tests_of_a_second_have_rows_where_nothing_is_recorded(tmp_path: Path) -> None:
    table = tmp_path / "spent.tsv"
    cases = {"tests/test_docs.py::test_a": [0.7, 0.5], "tests/test_docs.py::test_b": [0.5]}
    report = _report(tmp_path / "report.xml", cases | {"tests/test_docs.py::test_c": [0.2]})
    assert spent.main(["--record", f"--table={table}", str(report)]) == 0
    assert table.read_text() == "tests/test_docs.py\t0.7\ntests/test_docs.py::test_a\t1.2\n"


def test_what_is_new_or_has_grown_is_recorded_at_the_tables_pace_and_what_is_gone_is_dropped() -> None:
    measured = {row: seconds * 2 for row, seconds in TABLE.items()} | {LARGE: 400.0, "tests/core/test_new.py::t": 50.0}
    gone = "tests/core/test_40.py::test_it"
    found = spent.recorded(TABLE, [measured], lambda row: row != gone)
    assert found == {row: seconds for row, seconds in TABLE.items() if row != gone} | {
        LARGE: 200.0,
        "tests/core/test_new.py::t": 25.0,
    }
    assert spent.problems(found, spent.growth(found, [measured], lambda row: True)) == []


def test_a_row_is_in_the_tree_while_its_file_has_the_test() -> None:
    here = "tests/running/test_spent.py"
    assert spent.in_tree(here)
    assert spent.in_tree(f"{here}::test_a_row_is_in_the_tree_while_its_file_has_the_test")
    assert not spent.in_tree(f"{here}::test_" + "that_is_gone")
    assert not spent.in_tree("tests/running/test_gone.py")


def test_the_exit_status_says_whether_tests_have_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE)
    rows = {f"tests/running/test_spent.py::{name}": 10.0 + number for number, name in enumerate(names)}
    table = tmp_path / "spent.tsv"
    same = _report(tmp_path / "same.xml", {row: [seconds / 2] * 2 for row, seconds in rows.items()})
    assert spent.main([f"--table={table}", str(same)]) == 0
    assert f"nothing is recorded in {table} yet" in capsys.readouterr().out
    table.write_text(spent.write_table(rows))
    assert spent.main([f"--table={table}", str(same)]) == 0
    assert "all tests together take +0.0%" in capsys.readouterr().out
    largest, *_ = rows
    grown = _report(
        tmp_path / "grown.xml", {row: [seconds] for row, seconds in rows.items()} | {largest: [200.0, 300.0]}
    )
    assert spent.main([f"--table={table}", str(grown)]) == 1
    assert f"{largest} (10.0 s in the table)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        spent.main([f"--table={table}", str(tmp_path / "none.xml")])
    assert "none.xml: pytest writes one with --junitxml" in capsys.readouterr().err


def test_many_small_growths_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A third of the tests that takes an eighth more is 4 %, which may be noise."""
    names = re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE)[:15]
    rows = {f"tests/running/test_spent.py::{name}": 20.0 for name in names}
    table = tmp_path / "spent.tsv"
    table.write_text(spent.write_table(rows))
    grown = {row: [seconds * (1.125 if number % 3 == 0 else 1.0)] for number, (row, seconds) in enumerate(rows.items())}
    assert spent.main([f"--table={table}", str(_report(tmp_path / "grown.xml", grown))]) == 0
    told = capsys.readouterr().out
    assert "all tests together take +4.2% of what it has" in told
    assert "many have grown a little" in told


def test_cpu_counts_where_a_test_computes_and_the_clock_where_it_waits(tmp_path: Path) -> None:
    cpu = '<properties><property name="record" value="9"/><property name="cpu" value="1.5"/></properties>'
    cases = "".join(
        f'<testcase classname="c" name="{name}" file="{file}" time="4.0">{measured}</testcase>'
        for file, name, measured in (
            ("tests/core/test_a.py", "test_a[1]", cpu), ("tests/core/test_a.py", "test_a[2]", cpu),
            ("tests/core/test_a.py", "test_old", ""), ("tests/e2e/test_b.py", "test_b", cpu),
        )
    )  # fmt: skip
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert spent.read_report(report) == {
        "tests/core/test_a.py::test_a": 3.0,
        "tests/core/test_a.py::test_old": 4.0,
        "tests/e2e/test_b.py::test_b": 4.0,
    }


def test_the_cpu_of_a_test_and_of_what_it_starts_is_in_the_report(tmp_path: Path) -> None:
    """What it only waits for is not."""
    test = tmp_path / "test_three.py"
    spin = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.4: pass"
    test.write_text(
        "import subprocess, sys, time\n"
        f"def test_computes(): exec({spin!r})\n"
        f"def test_starts(): subprocess.run([sys.executable, '-c', {spin!r}], check=True)\n"
        "def test_waits(): time.sleep(0.4)\n"
    )
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "cpu_of_tests", "-p", "no:cacheprovider",
            "-o", "junit_family=xunit1",
            f"--junitxml={report}", test.name,
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(spent.ROOT / "tests" / "running")}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    taken = {row.rpartition("::")[2]: seconds for row, seconds in spent.read_report(report).items()}
    assert taken["test_computes"] >= 0.39
    assert taken["test_starts"] >= 0.39
    assert taken["test_waits"] < 0.3


def test_a_report_of_which_nothing_is_recorded_is_no_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "spent.tsv"
    here = "tests/running/test_spent.py"
    table.write_text(f"{here}::test_noise_is_no_growth\t20.0\n")
    known = _report(tmp_path / "unit.xml", {f"{here}::test_noise_is_no_growth": [20.0]})
    other = _report(tmp_path / "e2e.xml", {"tests/e2e/test_chaos.py::test_it": [300.0]})
    assert spent.main([f"--table={table}", str(known), str(other)]) == 0
    assert "nothing of it is recorded" in capsys.readouterr().out
    mixed = {f"{here}::test_noise_is_no_growth": [20.0], "tests/e2e/test_chaos.py::test_it": [300.0]}
    assert spent.main([f"--table={table}", str(_report(tmp_path / "both.xml", mixed))]) == 1


@pytest.mark.parametrize(("make", "gate", "status"), [(0, 0, 0), (2, 0, 2), (0, 1, 1), (2, 1, 2)])
def test_ci_fails_where_tests_fail_or_have_grown(tmp_path: Path, make: int, gate: int, status: int) -> None:
    programs = {"bin/make": f"exit {make}", "bin/npm": "exit 0", ".venv/bin/python": f'echo "$@"; exit {gate}'}
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (tmp_path / ".ci/reports").mkdir(parents=True)
    (tmp_path / ".ci/reports/unit.xml").write_text("of a run before")
    shutil.copy(spent.ROOT / ".ci/run", tmp_path / ".ci/run")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = subprocess.run([tmp_path / ".ci/run"], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stdout == "tests/running/spent.py .ci/reports/unit.xml .ci/reports/e2e.xml\n"
    assert not (tmp_path / ".ci/reports").exists()
