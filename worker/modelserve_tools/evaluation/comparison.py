"""Two runs over the same exercises, cell by cell: what the second lost and won, and whether chance explains it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from modelserve_tools.evaluation.columns import Row, columns
from modelserve_tools.evaluation.intervals import mcnemar_p, paired_interval
from modelserve_tools.evaluation.report import RIGHT, WRONG, CellResult, Report, ReportError


class CellDifference(BaseModel):
    """Counts over the exercises that both runs answered; second less first.

    `gained` were wrong in the first run and right in the second, `lost` the other way round. `difference` and its 95 %
    `interval` are in points, `p` is that of McNemar's exact test.
    """

    model_config = ConfigDict(frozen=True)

    skill: str
    distance: int | None
    pairs: int
    first_right: int
    second_right: int
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float]
    p: float


class Comparison(BaseModel):
    """`unpaired` names the cells that only one run measured."""

    model_config = ConfigDict(frozen=True)

    first: str
    second: str
    cells: tuple[CellDifference, ...]
    unpaired: tuple[str, ...]


def compare(first: Report, second: Report, *, names: tuple[str, str]) -> Comparison:
    """Pair the cells by skill and distance, their exercises by number. Raises ReportError when the exercises differ."""
    known = {(cell.skill, cell.distance): cell for cell in second.cells}
    differences, unpaired = [], []
    for one in first.cells:
        other = known.pop((one.skill, one.distance), None)
        difference = None if other is None else _difference(one, other)
        if difference is None:
            unpaired.append(one.name)
        else:
            differences.append(difference)
    unpaired += [cell.name for cell in known.values()]
    return Comparison(first=names[0], second=names[1], cells=tuple(differences), unpaired=tuple(unpaired))


def _difference(one: CellResult, other: CellResult) -> CellDifference | None:
    if one.fingerprint is None or other.fingerprint is None:
        return None
    if (one.seed, one.fingerprint) != (other.seed, other.fingerprint):
        what = f"seeds {one.seed} and {other.seed}" if one.seed != other.seed else "another version of the skill"
        raise ReportError(f"{one.name}: the runs asked different exercises ({what}); run both again with one --seed")
    marked = (RIGHT, WRONG)
    # Runs of different length are paired over the shorter one.
    pairs = [(a, b) for a, b in zip(one.outcomes, other.outcomes, strict=False) if a in marked and b in marked]
    if not pairs:
        return None
    n, gained, lost = len(pairs), pairs.count((WRONG, RIGHT)), pairs.count((RIGHT, WRONG))
    both = pairs.count((RIGHT, RIGHT))
    low, high = paired_interval(gained, lost, n)
    return CellDifference(
        skill=one.skill,
        distance=one.distance,
        pairs=n,
        first_right=both + lost,
        second_right=both + gained,
        gained=gained,
        lost=lost,
        difference=100 * (gained - lost) / n,
        interval=(100 * low, 100 * high),
        p=mcnemar_p(gained, lost),
    )


def comparison_table(comparison: Comparison) -> str:
    """A line per cell: both shares, their difference in points and what speaks for its being real."""
    headings = ("SKILL", "DISTANCE", "PAIRS", "A %", "B %", "B - A", "95 % INTERVAL", "GAINED", "LOST", "P")
    lines = columns(headings, [_row(cell) for cell in comparison.cells], text_columns=1)
    notes = [f"not measured by both: {', '.join(comparison.unpaired)}"] if comparison.unpaired else []
    return "\n".join(
        [f"A: {comparison.first}", f"B: {comparison.second}", "", *lines, *(["", *notes] if notes else [])]
    )


def _row(cell: CellDifference) -> Row:
    shares: Sequence[str] = [f"{100 * right / cell.pairs:.1f}" for right in (cell.first_right, cell.second_right)]
    low, high = cell.interval
    return Row(
        (
            cell.skill,
            "-" if cell.distance is None else str(cell.distance),
            str(cell.pairs),
            *shares,
            f"{cell.difference:+.1f}",
            f"{low:+.1f} to {high:+.1f}",
            str(cell.gained),
            str(cell.lost),
            f"{cell.p:.3g}",
        )
    )
