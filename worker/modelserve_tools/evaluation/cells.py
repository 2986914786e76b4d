"""Which exercises a run asks: a cell is one skill at one distance, and its exercises are numbered from 0."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelserve_tools.evaluation.exercise import Exercise

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Cell:
    """`n` exercises of one skill. `distance` is in words and marks; None for skills that have none."""

    skill: str
    distance: int | None
    n: int


def plan_cells(
    *, short: Iterable[str], long: Iterable[str], distances: Sequence[int], n: int, n_at: Mapping[int, int]
) -> list[Cell]:
    """A cell per short skill, and one per long skill and distance: `n` exercises each, or what `n_at` has."""
    cells = [Cell(skill=skill, distance=None, n=n) for skill in short]
    return cells + [Cell(skill=skill, distance=each, n=n_at.get(each, n)) for skill in long for each in distances]


def words_and_marks(exercise: Exercise) -> int:
    """Words and punctuation marks of the messages' text. The prompt has more tokens: turn marks, tools, spelling."""
    return sum(len(_WORD_OR_MARK.findall(message.get("content") or "")) for message in exercise.messages)


def fingerprint(exercise: Exercise) -> str:
    """16 hexadecimal digits that differ when the question differs: runs are paired only over the same questions."""
    question = json.dumps([exercise.messages, exercise.tools, exercise.thinking], sort_keys=True)
    return hashlib.sha256(question.encode()).hexdigest()[:16]
