"""Which plans an operator makes, known by the objects that its supply keeps."""

from __future__ import annotations

from typing import Any

from modelserve.api import PlanStatus


class Planned:
    """Plans that were made of a world's supplies since the last `clear`, as far as `look` was called while they were
    kept: the next one of the same shape is the same object."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._seen: dict[int, PlanStatus] = {}
        self._before = 0

    def look(self) -> None:
        for offered in self._world.gatherer.supply().offered.values():
            self._seen |= {id(plan): plan for plan in offered.plans.values()}

    def __len__(self) -> int:
        return len(self._seen) - self._before

    def clear(self) -> None:
        self.look()
        self._before = len(self._seen)
