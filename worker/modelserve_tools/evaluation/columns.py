"""Lines of aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The first cells of a line; `note` stands in place of those that are left out."""

    cells: tuple[str, ...]
    note: str = ""


def columns(headings: Sequence[str], rows: Sequence[Row], *, text_columns: int) -> list[str]:
    """The headings and a line per row: the first `text_columns` aligned left, figures aligned right."""
    shown = [Row(tuple(headings)), *rows]
    widths = [max(len(row.cells[c]) for row in shown if c < len(row.cells)) for c in range(len(headings))]
    lines = []
    for row in shown:
        cells = [
            cell.ljust(width) if c < text_columns else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(row.cells, widths, strict=False))
        ]
        lines.append("  ".join([*cells, *([row.note] if row.note else [])]).rstrip())
    return lines
