"""Measures how long each step had the device, as the engine's loop sees it: two readings of a clock a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.scheduling.stats import TimedStep


class StepClock:
    """A step begins when it is launched or, behind another one, when that ends; so no idle time is in any."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._launched_s: dict[int, float] = {}  # by step, of those in flight
        self._last_end_s = 0.0
        self._timed: list[TimedStep] = []

    def launching(self, batch: ScheduledBatch) -> None:
        """Call before the launch, which on the CPU is the whole step."""
        self._launched_s[batch.step] = self._now()

    def ended(self, batch: ScheduledBatch, *, failed: bool) -> Sequence[TimedStep]:
        """Its result is there: its time. A step that failed, only copied pages or was a trial has none and ends."""
        end, launched = self._now(), self._launched_s.pop(batch.step)
        start, self._last_end_s = max(launched, self._last_end_s), end
        timed = [] if failed or not batch.num_requests or batch.trial else [_timed(batch, end - start)]
        self._timed += timed
        return timed

    def take(self) -> list[TimedStep]:
        """Steps that ended since the last call."""
        timed, self._timed = self._timed, []
        return timed


def _timed(batch: ScheduledBatch, seconds: float) -> TimedStep:
    decoded = batch.lengths == np.maximum(batch.drawn, 1)  # a prompt's last row alone costs what a decode does
    decodes, drafts = int(decoded.sum()), int(batch.lengths[decoded].sum() - decoded.sum())
    rows = len(batch.token_ids) - drafts
    context = int(batch.starts[decoded].sum()) / decodes if decodes else 0.0
    if decodes == rows:
        return TimedStep(seconds, decodes, context, 0, 0.0, drafts, batch.asked)
    starts, lengths = batch.starts[~decoded].astype(float), batch.lengths[~decoded]
    keys = float((lengths * (starts + lengths / 2)).sum())
    return TimedStep(seconds, decodes, context, rows - decodes, keys / (rows - decodes), drafts, batch.asked)
