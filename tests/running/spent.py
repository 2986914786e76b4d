"""Seconds by test: kept in .ci/spent.tsv, and compared with what a run took.

    python tests/running/spent.py REPORT...             # exit status 1 where tests take more than the table allows
    python tests/running/spent.py --record REPORT...    # write what is new or has grown into the table

A report is what `pytest --junitxml` writes. Seconds are of CPU, as `tests/conftest.py` measures them of a test and of
the programs that it waits for: what runs beside tests does not count. End-to-end tests, which wait for what others
compute, have their time by the clock. The table has a row a test of a second and more, over all its parameters, and one
a file for what its shorter tests take together. Without a table all rows are recorded; a report of which the table has
no row is compared with nothing until it is recorded.

Machines differ by more than tests may grow. So the seconds of each report are divided by the median of how much longer
its rows took than the table says: what all rows have in common is no growth. What is certain, and fails, is what new
tests take, and what others take beyond twice their seconds in the table, or beyond five seconds where that is more,
less what tests took that are gone: which parameters are drawn (`run_length`) changes a row by less. By how much all
rows together have grown is only said: caches that a busy neighbour fills do as much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / ".ci" / "spent.tsv"
ALLOWED_SHARE = 0.03
"""Of the table's sum, by which tests may grow without a line in the table."""
LEAST_SECONDS = 5.0
"""What a row may always take, and a test that the table does not name without being new: less is noise."""
COMPARED_SECONDS = 1.0
"""What a test has to take for a row of its own, and a row for its ratio to say something of the machine."""

WAITING = "tests/e2e/"
"""Tests of which the CPU is that of others' processes."""

Seconds = Mapping[str, float]
"""By row: `tests/core/test_a.py::test_b`, or `tests/core/test_a.py` for all its tests that have no row."""


class Growth(NamedTuple):
    """Seconds of the table's machine."""

    rows: Seconds
    """By which a row has certainly grown; only those that have."""
    together: float
    """By which all rows of the reports have grown, noise among it; below zero where they are faster."""
    gone: float
    """Of rows whose test is not there any more."""


def read_report(report: Path) -> Seconds:
    """Seconds of each test, of its set-up and clean-up too; of CPU where the report has them and nobody else computes.

    Raises OSError, ElementTree.ParseError, KeyError, ValueError."""
    spent: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        row = f"{case.attrib['file']}::{case.attrib['name'].partition('[')[0]}"
        cpu = None if row.startswith(WAITING) else case.find("./properties/property[@name='cpu']")
        spent[row] += float(case.attrib["time"] if cpu is None else cpu.attrib["value"])  # type: ignore[assignment]
    return spent


def read_table(text: str) -> Seconds:
    rows = (line.split("\t") for line in text.splitlines())
    return {row: float(seconds) for row, seconds in rows}


def write_table(spent: Seconds) -> str:
    return "".join(f"{row}\t{seconds:.1f}\n" for row, seconds in sorted(spent.items()))


def in_rows(table: Seconds, spent: Seconds, own: float) -> Seconds:
    """Tests by row: its own where the table has one or it took `own` seconds, else its file's."""
    rows: Counter[str] = Counter()
    for test, seconds in spent.items():
        rows[test if test in table or seconds >= own else test.partition("::")[0]] += seconds  # type: ignore[assignment]
    return rows


def pace(table: Seconds, spent: Seconds) -> float:
    """How many times as long as in the table rows took here; 1 where none is in both."""
    rows = in_rows(table, spent, float("inf"))
    ratios = [rows[row] / table[row] for row in table if row in rows and table[row] >= COMPARED_SECONDS]
    return statistics.median(ratios) if ratios else 1.0


def at_pace(table: Seconds, spent: Seconds) -> Seconds:
    """A report by row, in seconds of the table's machine."""
    ratio = pace(table, spent)
    own = LEAST_SECONDS * ratio if table else COMPARED_SECONDS
    return {row: seconds / ratio for row, seconds in in_rows(table, spent, own).items()}


def allowed(table: Seconds, row: str) -> float:
    return max(2 * table[row], LEAST_SECONDS) if row in table else 0.0


def growth(table: Seconds, reports: Iterable[Seconds], there: Callable[[str], bool]) -> Growth:
    """What the reports take more than the table; `there` says whether a row's test is still in the tree."""
    taken = [row for spent in reports for row in at_pace(table, spent).items()]
    grown = {row: seconds - allowed(table, row) for row, seconds in taken if seconds > allowed(table, row)}
    gone = sum(seconds for row, seconds in table.items() if not there(row))
    return Growth(grown, sum(seconds - table.get(row, 0.0) for row, seconds in taken) - gone, gone)


def problems(table: Seconds, found: Growth) -> list[str]:
    """What to tell where tests have grown by more than they may, the largest first; empty where they have not."""
    may = ALLOWED_SHARE * sum(table.values())
    if (total := sum(found.rows.values()) - found.gone) <= may:
        return []
    lines = [f"tests take {total:.0f} s more than .ci/spent.tsv allows, which is {may:.0f} s:"]
    for row, more in sorted(found.rows.items(), key=lambda item: -item[1])[:10]:
        known = f"{table[row]:.1f} s in the table" if row in table else "new"
        lines.append(f"  {more:6.1f} s  {row} ({known})")
    return [
        *lines,
        "Make them faster. Where they are worth it, say so in the commit message, and record them in the same change:",
        "  .venv/bin/python tests/running/spent.py --record .ci/reports/unit.xml .ci/reports/e2e.xml",
    ]


def recorded(table: Seconds, reports: Iterable[Seconds], there: Callable[[str], bool]) -> Seconds:
    """The table with what is new or has grown in the reports, without what is gone; all of them where it is empty."""
    merged = {row: seconds for row, seconds in table.items() if there(row)}
    for spent in reports:
        merged |= {row: seconds for row, seconds in at_pace(table, spent).items() if seconds > allowed(table, row)}
    return merged


def in_tree(row: str) -> bool:
    """Whether a row's file, and its test where it names one, are in this tree."""
    file, _, test = row.partition("::")
    path = ROOT / file
    return path.is_file() and (not test or f"def {test}(" in path.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument(
        "--record", action="store_true", help="write into the table what is new or has grown, and drop what is gone"
    )
    parser.add_argument("--table", type=Path, default=TABLE)
    asked = parser.parse_args(arguments)
    if absent := [str(report) for report in asked.reports if not report.is_file()]:
        parser.error(f"no report {', '.join(absent)}: pytest writes one with --junitxml, make unit and make e2e do so")
    reports = [read_report(report) for report in asked.reports]
    table = read_table(asked.table.read_text()) if asked.table.exists() else {}
    unknown: list[Seconds] = []
    for report, spent in zip(asked.reports, reports, strict=True):
        whole, ratio = sum(spent.values()), pace(table, spent)
        print(f"{report}: {whole:.0f} s in {len(spent)} tests, {ratio:.2f} times what the table has for most")
        if table and spent and not in_rows(table, spent, float("inf")).keys() & table.keys():
            print(f"nothing of it is recorded in {asked.table} yet: it is compared with nothing (--record)")
            unknown.append(spent)
    if asked.record:
        asked.table.write_text(write_table(recorded(table, reports, in_tree)))
        return 0
    if not table:
        print(f"nothing is recorded in {asked.table} yet: what tests take is compared with nothing (--record)")
        return 0
    found = growth(table, [spent for spent in reports if spent not in unknown], in_tree)
    told = problems(table, found)
    share = found.together / sum(table.values())
    print(f"at the table's pace all tests together take {share:+.1%} of what it has")
    if share > ALLOWED_SHARE and not told:
        print("no test stands out: many have grown a little, or something ran beside a part of them")
    for line in told:
        print(line)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
