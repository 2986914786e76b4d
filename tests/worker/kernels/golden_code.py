"""The machine code of every kernel that models launch, as it is committed in `golden_code.tsv`, a row a kernel.

    python tests/worker/kernels/golden_code.py --record          compile what has changed, and write the rows
    python tests/worker/kernels/golden_code.py --record --all    compile all, for about 9 minutes of CPU
    python tests/worker/kernels/golden_code.py --same-code FILE  compare with another such file, whatever rows are named

A row: GPU generation, registers, bytes of spill stores, bytes of shared memory of a launch, `machine_code.code_hash`,
a hash of all that it was compiled from, and the launch: kernel, element types of pointers in their order, constants.
Triton makes one of two codes of some kernels, another process another one: such a row has both, as `one|other`.
Tests compare the rows with what is compiled, which are launches that have other sources than their row has, and one in
SAMPLED of the others: the same compilers make the same code of the same source. Whoever changes a kernel records anew
in the same commit, whose difference then names the launches that it moves; a comment moves sources alone, which waits
for the next who records. Files before and after a change that only renames or moves have the same code:
`git show main:FILE` is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden_code.tsv"
RECORD = "python tests/worker/kernels/golden_code.py --record"
SAMPLED = 24
_COMPILER, _CHECK = "# compiled by ", "# early work is checked as "


@dataclass(frozen=True, order=True)
class Row:
    target: str  # sm_90
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    code: str
    source: str = ""

    @property
    def launch(self) -> tuple[str, str]:
        return self.target, self.name

    @property
    def compiled(self) -> tuple[str, int, int, int, str]:
        """What the launch was compiled to."""
        return self.target, self.registers, self.spilled_bytes, self.shared_bytes, self.code

    def is_of(self, committed: Row) -> bool:
        """Whether it is one of the codes of that row."""
        one_of = set(self.code.split("|")) <= set(committed.code.split("|"))
        return one_of and replace(self, code="").compiled == replace(committed, code="").compiled

    def or_else(self, other: Row) -> Row:
        """Both codes, where they differ in nothing else."""
        if replace(self, code="") != replace(other, code=""):
            return self
        return replace(self, code="|".join(sorted({*self.code.split("|"), *other.code.split("|")})))

    def __str__(self) -> str:
        sizes = f"{self.registers:3d}\t{self.spilled_bytes:4d}\t{self.shared_bytes:6d}"
        return f"{self.target}\t{sizes}\t{self.code}\t{self.source}\t{self.name}"


@dataclass(frozen=True)
class Golden:
    compilers: tuple[str, ...]
    rows: tuple[Row, ...]
    check: str = ""  # a hash of what looks at early work, whose findings of a row are trusted with it

    def head(self) -> Iterator[str]:
        yield "# Written by `golden_code.py --record`: target, registers, spilled, shared bytes, code, source, launch"
        yield from (f"{_COMPILER}{each}" for each in self.compilers)
        yield f"{_CHECK}{self.check}"

    def text(self) -> str:
        return "\n".join((*self.head(), *map(str, sorted(self.rows)), ""))


def read(lines: Iterable[str]) -> Golden:
    """Of a file's lines, or of those that compile_kernels.py prints: what is no row and no compiler is passed over."""
    compilers, rows, check = list[str](), list[Row](), ""
    for line in lines:
        parts = line.rstrip("\n").split("\t")
        if line.startswith(_COMPILER):
            compilers.append(line.removeprefix(_COMPILER).strip())
        elif line.startswith(_CHECK):
            check = line.removeprefix(_CHECK).strip()
        elif len(parts) == 7:
            target, registers, spilled, shared, code, source, name = parts
            rows.append(Row(target, name, int(registers), int(spilled), int(shared), code, source))
    return Golden(tuple(compilers), tuple(rows), check)


def moved(golden: Golden, now: Golden) -> list[str]:
    """What is to be said of rows that are not as they are committed; empty where all are."""
    if golden.compilers != now.compilers:
        recorded, here = " and ".join(golden.compilers), " and ".join(now.compilers)
        others = f"the rows are of {recorded}, and here is {here}: what other compilers make is not compared"
        return [f"{others}. Install what requirements.txt pins; or, where it pins others now, record anew: {RECORD}"]
    before, after = ({row.launch: row for row in each.rows} for each in (golden, now))
    said = [
        f"{row.target} {row.name}: {_sizes(row)}, was {_sizes(before[row.launch])}"
        for row in now.rows
        if row.launch in before and not row.is_of(before[row.launch])
    ]
    gone = [row for row in golden.rows if row.launch not in after]
    for row in (row for row in now.rows if row.launch not in before):
        alike = next((other for other in gone if other.compiled == row.compiled), None)
        if alike is None:
            said.append(f"{row.target} {row.name}: is new")
        else:
            gone.remove(alike)
            said.append(f"{row.target} {row.name}: is the code that was {alike.name}")
    said += [f"{row.target} {row.name}: is compiled no more" for row in gone]
    return [*said, f"{len(said)} rows moved. Where that is meant, record them in this commit: {RECORD}"] if said else []


def _sizes(row: Row) -> str:
    return f"code {row.code}, {row.registers} registers, {row.spilled_bytes} B spilled, {row.shared_bytes} B shared"


def other_code(one: Golden, other: Golden) -> Iterator[str]:
    """Rows by which two files differ when names are left out, how often each code is compiled included."""
    for mark, left, right in (("-", one, other), ("+", other, one)):
        surplus = Counter(row.compiled for row in left.rows) - Counter(row.compiled for row in right.rows)
        for row in sorted(left.rows):
            if surplus[row.compiled] > 0:
                surplus[row.compiled] -= 1
                yield f"{mark} {row}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--record", action="store_true", help=f"write {GOLDEN.name}")
    asked.add_argument("--same-code", metavar="FILE", type=Path, help="exit with 1 where the code of FILE is another")
    parser.add_argument(
        "--all", action="store_true", help="with --record: compile also what has the sources of its row"
    )
    chosen = parser.parse_args()
    golden = committed()
    if chosen.same_code is not None:
        differences = list(other_code(read(chosen.same_code.read_text().splitlines()), golden))
        counts = Counter(row.target for row in golden.rows)
        print(*differences, *(f"{target}: {count} launches" for target, count in counts.items()), sep="\n")
        print(f"{len(differences)} rows of other code" if differences else "all code is the same")
        return bool(differences)
    from compile_kernels import COMPILED, compile_all, nothing_compiled

    trusted = None if chosen.all else golden
    outcomes, problems = compile_all(COMPILED, trusted=trusted)
    rows = tuple(row for outcome in outcomes if (row := outcome.row) is not None)
    print(*problems, *moved(golden, replace(nothing_compiled(), rows=rows)), sep="\n")
    before = {row.launch: row for row in golden.rows}
    now = replace(nothing_compiled(), rows=tuple(row.or_else(before.get(row.launch, row)) for row in rows))
    GOLDEN.write_text(now.text())
    return bool(problems)


def committed() -> Golden:
    return read(GOLDEN.read_text().splitlines()) if GOLDEN.exists() else Golden((), ())


if __name__ == "__main__":
    import golden_code  # whose rows compile_kernels has: those of __main__ are of another class

    sys.exit(golden_code.main())
