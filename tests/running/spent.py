"""Seconds by test file: kept in .ci/spent.tsv, and compared with what a run took.

    python tests/running/spent.py REPORT...             # exit status 1 where tests take more than the table allows
    python tests/running/spent.py --record REPORT...    # write what these reports have into the table

A report is what `pytest --junitxml` writes. Machines differ, and one is now busy and now not. So the seconds of each
report are divided by the median of how much longer its files took than the table says: what all files have in common
is no growth. Growth is what new files take, and what others take beyond twice their seconds in the table, or beyond
five seconds where that is more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / ".ci" / "spent.tsv"
ALLOWED_SHARE = 0.03
"""Of the table's sum, by which tests may grow without a line in the table."""
LEAST_SECONDS = 5.0
"""What a file may always take: less is noise."""
COMPARED_SECONDS = 1.0
"""What a file has to have taken for its ratio to say something of the machine."""

Seconds = Mapping[str, float]


def read_report(report: Path) -> Seconds:
    """Seconds of each test file, of its set-up and clean-up too. Raises ElementTree.ParseError, KeyError."""
    spent: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        spent[case.attrib["file"]] += float(case.attrib["time"])  # type: ignore[assignment]
    return spent


def read_table(text: str) -> Seconds:
    rows = (line.split("\t") for line in text.splitlines())
    return {file: float(seconds) for file, seconds in rows}


def write_table(spent: Seconds) -> str:
    return "".join(f"{file}\t{seconds:.1f}\n" for file, seconds in sorted(spent.items()))


def scale(table: Seconds, spent: Seconds) -> float:
    """How many times as long as in the table files took here; 1 where none is in both."""
    ratios = [spent[file] / table[file] for file in table if file in spent and table[file] >= COMPARED_SECONDS]
    return statistics.median(ratios) if ratios else 1.0


def growth(table: Seconds, spent: Seconds) -> Seconds:
    """Seconds of the table's machine by which files have grown; only those that have."""
    ratio = scale(table, spent)
    grown = {}
    for file, seconds in spent.items():
        allowed = max(2 * table[file], LEAST_SECONDS) if file in table else 0.0
        if (more := seconds / ratio - allowed) > 0:
            grown[file] = more
    return grown


def problems(table: Seconds, reports: Iterable[Seconds]) -> list[str]:
    """What to tell where tests have grown by more than they may, the largest first; empty where they have not."""
    grown = {file: more for spent in reports for file, more in growth(table, spent).items()}
    allowed = ALLOWED_SHARE * sum(table.values())
    if (total := sum(grown.values())) <= allowed:
        return []
    lines = [f"tests take {total:.0f} s more than .ci/spent.tsv allows, which is {allowed:.0f} s:"]
    for file, more in sorted(grown.items(), key=lambda item: -item[1])[:10]:
        known = f"{table[file]:.1f} s in the table" if file in table else "new"
        lines.append(f"  {more:6.1f} s  {file} ({known})")
    return [
        *lines,
        "Make them faster. Where they are worth it, say so in the commit message, and record them in the same change:",
        "  .venv/bin/pytest --junitxml=/tmp/report.xml FILES",
        "  .venv/bin/python tests/running/spent.py --record /tmp/report.xml",
    ]


def recorded(table: Seconds, reports: Iterable[Seconds], there: Sequence[str]) -> Seconds:
    """The table with the rows of the reports, and without those of files that are not `there` any more."""
    merged = dict(table)
    for spent in reports:
        merged |= spent
    return {file: seconds for file, seconds in merged.items() if file in there}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--record", action="store_true", help="write the reports' seconds into the table")
    parser.add_argument("--table", type=Path, default=TABLE)
    asked = parser.parse_args(arguments)
    reports = [read_report(report) for report in asked.reports]
    table = read_table(asked.table.read_text()) if asked.table.exists() else {}
    for report, spent in zip(asked.reports, reports, strict=True):
        whole, ratio = sum(spent.values()), scale(table, spent)
        print(f"{report}: {whole:.0f} s in {len(spent)} files, {ratio:.2f} times what the table has for most")
    if asked.record:
        there = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
        asked.table.write_text(write_table(recorded(table, reports, there)))
        return 0
    found = problems(table, reports)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
