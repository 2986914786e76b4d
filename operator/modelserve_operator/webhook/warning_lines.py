"""Sentences as the lines of `Warning:` that kubectl prints: short each, and few together. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

LINE_CHARACTERS = 120  # of one warning
ALL_CHARACTERS = 4096  # of all together: the API server cuts what is beyond
CUT = "Of more that could be said nothing is shown here; `kubectl modelserve plan` shows all."
_INDENT = "  "


def warning_lines(sentences: Iterable[str]) -> list[str]:
    """The sentences, in their order, as warnings within both limits; what does not fit is left out, and said to be.

    kubectl prints each text once, so of equal lines the first is kept. Control characters, which a header cannot
    carry, become spaces; so does all that is not printable.
    """
    lines: dict[str, None] = {}
    for sentence in sentences:
        text = " ".join("".join(c if c.isprintable() else " " for c in sentence).split())
        wrapped = textwrap.wrap(text, LINE_CHARACTERS, subsequent_indent=_INDENT, break_on_hyphens=False)
        lines |= dict.fromkeys(wrapped)
    kept: list[str] = []
    left = ALL_CHARACTERS
    for line in lines:
        left -= len(line.encode())
        if left < 0:
            break
        kept.append(line)
    if len(kept) == len(lines):
        return kept
    while kept and sum(len(each.encode()) for each in kept) + len(CUT) > ALL_CHARACTERS:
        kept.pop()
    return [*kept, CUT]
