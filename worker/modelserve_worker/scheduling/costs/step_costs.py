"""What a step of decodes takes, by its rows: as planned for the GPU, or as measured where nothing is planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelserve.planning.speed.draft_time import Proposing
from modelserve.planning.speed.drafted_steps import VerifyingSteps
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.sizing.speculation import Speculation
from modelserve_worker.batch import AskedDrafter
from modelserve_worker.scheduling.stats import TimedStep

Seconds = NDArray[np.float64]
_DECAY = 0.98  # of what a measured step still counts when the next one has come
_ROW_SHARE = 0.1  # of a step of one row, that each further row takes while nothing is known
_PRIOR_STEPS = 1.0  # that this counts for
_DRAFT_SHARE = 0.05  # of a step of one row, that a draft takes while nothing is known


class StepCosts(Protocol):
    """Times that decide how many drafts a step verifies."""

    def seconds(self, decodes: int, most_drafts: int, *, context: float) -> Seconds:
        """Of a step of so many requests at a mean length of `context` tokens, by the drafts it verifies in all:
        float64 [most_drafts + 1], in s. Of their ratios alone something follows."""
        ...

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> Seconds:
        """Of drafts of so many requests by one of the drafters that are asked, by how many of each it is asked for:
        float64 [most + 1], in s; none take none."""
        ...

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Steps ended."""
        ...


class PlannedCosts:
    """Of `RankSpeed`, at the sizes of captured steps: drafts that fit in the padding of one cost nothing but
    the experts that their rows choose, which padding does not."""

    def __init__(
        self, speed: RankSpeed, *, max_num_seqs: int, speculation: Speculation, drafts: Sequence[Proposing] = ()
    ) -> None:
        """`drafts`: of the drafters that are asked, in their order."""
        self._drafts = tuple(drafts)
        self._steps = steps = VerifyingSteps(speed, max_num_seqs=max_num_seqs, speculation=speculation)
        self._alone = np.array([steps.time(max(1, rows), drafted=False).seconds for rows in range(max_num_seqs + 1)])
        times = [steps.time(max(1, rows), drafted=True) for rows in range(speculation.step_rows(max_num_seqs) + 1)]
        self._weights = np.array([time.weights for time in times])
        self._beside = np.array([time.seconds for time in times]) - self._weights
        self._least = np.array([steps.least_rows(requests) for requests in range(max_num_seqs + 1)])

    def seconds(self, decodes: int, most_drafts: int, *, context: float) -> Seconds:
        alone, drafted = (self._steps.reading(decodes, context=context, drafted=each) for each in (False, True))
        rows = np.minimum(decodes + np.arange(most_drafts + 1), len(self._weights) - 1)
        seconds: Seconds = self._beside[np.maximum(rows, self._least[decodes])] + self._weights[rows] + drafted
        seconds[0] = self._alone[decodes] + alone
        return seconds

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> Seconds:
        if drafter >= len(self._drafts):
            return np.zeros(most + 1)
        return np.array(self._drafts[drafter].seconds(requests, most, context=context))

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Plans are kept."""


class MeasuredCosts:
    """A constant and a term per row, fitted to the latest steps of decodes: on the CPU, and on a GPU that no plan
    knows. What steps take longer that make drafts is what these take, of each request the same."""

    def __init__(self, drafters: Sequence[AskedDrafter] = ()) -> None:
        self._at_once = [drafter.at_once for drafter in drafters] or [False]
        self._products = np.zeros((2, 2))
        self._targets = np.zeros(2)
        self._draft: list[float | None] = [None] * len(self._at_once)  # of one request, by drafter, in s

    def seconds(self, decodes: int, most_drafts: int, *, context: float) -> Seconds:  # noqa: ARG002 - in the constant
        constant, row = self._fitted()
        found: Seconds = constant + row * (decodes + np.arange(most_drafts + 1.0))
        return found

    def draft_seconds(
        self,
        drafter: int,
        requests: int,
        most: int,
        *,
        context: float,  # noqa: ARG002 - in the mean
    ) -> Seconds:
        (constant, row), draft, counts = self._fitted(), self._draft[drafter], np.arange(most + 1.0)
        each = _DRAFT_SHARE * (constant + row) if draft is None else draft
        passes = np.minimum(counts, 1.0) if self._at_once[drafter] else counts
        found: Seconds = requests * each * passes
        return found

    def observe(self, steps: Sequence[TimedStep]) -> None:
        for step in steps:
            if step.prompt_rows or not step.decodes:
                continue
            of = step.asked.drafter
            passes = min(1, step.asked.drafts) if self._at_once[of] else step.asked.drafts
            rows, drafts, before = step.decodes + step.drafts, step.decodes * passes, self._draft[of]
            if drafts and self._products[0, 0]:
                constant, row = self._fitted()
                draft = max(0.0, step.seconds - constant - row * rows) / drafts
                self._draft[of] = draft if before is None else before + (1 - _DECAY) * (draft - before)
            if not drafts or self._draft[of] is None:  # the first steps of all are better than none
                self._add(rows, step.seconds)

    def _add(self, rows: float, seconds: float) -> None:
        columns = np.array([1.0, rows])
        self._products = _DECAY * self._products + np.outer(columns, columns)
        self._targets = _DECAY * self._targets + columns * seconds

    def _fitted(self) -> tuple[float, float]:
        if not self._products[0, 0]:
            return 1.0, _ROW_SHARE
        mean = self._targets[0] / self._products[0, 0]
        rows = self._products[0, 1] / self._products[0, 0]
        # As if a few steps more had come, in which every row took its assumed share.
        slope = _ROW_SHARE * mean / (1 + _ROW_SHARE * rows)
        varied = self._products[1, 1] - rows * self._products[0, 1] + _PRIOR_STEPS
        together = self._targets[1] - rows * self._targets[0] + _PRIOR_STEPS * slope
        row = max(together / varied, 1e-3 * mean / max(rows, 1.0))
        return max(float(mean - row * rows), 0.0), float(row)
