"""Keeps the times of the last steps by kind and size, for /v1/plan: in the front end, so that no step waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from modelserve.measured_speed import MAX_MEASURED, MeasuredSteps, StepKind
from modelserve_worker.scheduling.stats import TimedStep

KEPT_STEPS = 256  # of each kind and size: what is older no longer counts
LEAST_STEPS = 20  # fewer say nothing
OUTLIER = 3.0  # times the median: a compilation, a page fault, a neighbour
MEASURED_COLUMNS = 5  # of a TimedStep: what it took, and what plans count of what was in it


class MeasuredSpeed:
    """Recent steps, in classes whose rows differ by less than twice, so that their times have a meaningful mean."""

    def __init__(self) -> None:
        self._recent: dict[tuple[StepKind, int], deque[TimedStep]] = {}

    def add(self, steps: Iterable[TimedStep]) -> None:
        for step in steps:
            if step.drafts or step.asked.drafts:  # which plans do not count
                continue
            of = step.kind, (step.decodes + step.prompt_rows).bit_length()
            self._recent.setdefault(of, deque(maxlen=KEPT_STEPS)).append(step)

    def report(self) -> list[MeasuredSteps]:
        """Classes with LEAST_STEPS and more, those that took the most time first, MAX_MEASURED at most."""
        found = []
        for (kind, _), steps in self._recent.items():
            table = np.array([step[:MEASURED_COLUMNS] for step in steps])
            table = table[table[:, 0] <= OUTLIER * np.median(table[:, 0])]
            if len(table) >= LEAST_STEPS and table[:, 0].mean() > 0:
                found.append((float(table[:, 0].sum()), _means(kind, table)))
        found.sort(key=lambda entry: -entry[0])
        return [measured for _, measured in found[:MAX_MEASURED]]


def _means(kind: StepKind, table: np.ndarray) -> MeasuredSteps:
    """Columns [steps, MEASURED_COLUMNS] as TimedStep has them; contexts are means over requests and over rows."""
    seconds, decodes, context, rows, prompt_context = table.T
    return MeasuredSteps(
        kind=kind,
        steps=len(table),
        milliseconds=round(float(seconds.mean()) * 1e3, 4),
        requests=round(float(decodes.mean()), 2),
        context_tokens=round(_weighted(context, decodes), 1),
        prompt_tokens=round(float(rows.mean()), 1),
        prompt_context=round(_weighted(prompt_context, rows), 1),
    )


def _weighted(values: np.ndarray, weights: np.ndarray) -> float:
    return float((values * weights).sum() / weights.sum()) if weights.any() else 0.0
