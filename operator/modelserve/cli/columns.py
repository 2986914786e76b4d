"""Rows of text as lines whose columns stand below each other."""

from __future__ import annotations

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """A line a row, two spaces between columns, which all rows have as many of; the first `left` of them begin at the
    left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [each.ljust(width) for each, width in zip(row[:left], widths, strict=False)]
        cells += [each.rjust(width) for each, width in zip(row[left:], widths[left:], strict=True)]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]
