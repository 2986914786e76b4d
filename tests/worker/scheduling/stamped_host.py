"""Host memory of a device with stamped rows, whose copies happen and end whenever they like."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import HostCopy, ScheduledBatch
from modelserve_worker.host_pages import LANE_ENDED, HostProgress


@dataclass
class _Step:
    number: int
    copies: list[HostCopy]  # that have not happened


class StampedHost:
    """Copies between `memory`, whose pages `page` finds, and places. Each happens at once or up to its end, which is
    told some time after that: with `never` set, of stores or of loads, not any more. With `off` set it is told that the
    copies have ended with an error: that was another rank's, and those of this one happen some time, or never.
    """

    def __init__(
        self,
        memory: np.ndarray,
        page: Callable[[LayerKind, int], slice],
        random: Random,
        *,
        ignore_awaited: bool = False,
    ) -> None:
        self._memory = memory
        self._page = page
        self._random = random
        self._ignore_awaited = ignore_awaited
        self._places: dict[tuple[LayerKind, int], np.ndarray] = {}
        self._stores: deque[_Step] = deque()
        self._loads: deque[_Step] = deque()
        self.told = HostProgress()
        self.never: set[str] = set()
        self.off: set[str] = set()
        self.copies_after_off = 0  # that a step brought all the same
        self.awaited = 0  # loads that a step waited for

    def launch(self, batch: ScheduledBatch) -> None:
        lanes = (
            ("stored", self._stores, batch.stores, self._store), ("loaded", self._loads, batch.loads, self._load)
        )  # fmt: skip
        for name, lane, copies, run in lanes:
            self.copies_after_off += len(copies) if name in self.off else 0
            late = [copy for copy in copies if lane or self._random.random() < 0.5]
            for copy in copies:
                if copy not in late:
                    run(copy)
            if copies:
                lane.append(_Step(batch.step, late))

    def await_loads(self, step: int) -> None:
        """The device waits where the host has heard of nothing."""
        for each in self._loads:
            if each.number <= step and not self._ignore_awaited:
                self.awaited += len(each.copies)
                for copy in each.copies:
                    self._load(copy)
                each.copies = []

    def progress(self, pieces: int) -> HostProgress:
        """What ended since it was asked last; so many pieces are pinned."""
        told = self.told._replace(pieces=max(self.told.pieces, pieces))
        for name, lane, run in (("stored", self._stores, self._store), ("loaded", self._loads, self._load)):
            if name in self.off:
                told = told._replace(**{name: LANE_ENDED})
                for step in lane:
                    if step.copies and self._random.random() < 0.1:
                        run(step.copies.pop())
                continue
            for _ in range(0 if name in self.never else self._random.choice([0, 0, 1, 3])):
                if lane:
                    step = lane.popleft()
                    for copy in step.copies:
                        run(copy)
                    told = told._replace(**{name: step.number})
        self.told = told
        return told

    def _store(self, copy: HostCopy) -> None:
        self._places[copy.kind, copy.place] = self._memory[self._page(copy.kind, copy.page)].copy()

    def _load(self, copy: HostCopy) -> None:
        self._memory[self._page(copy.kind, copy.page)] = self._places[copy.kind, copy.place]
