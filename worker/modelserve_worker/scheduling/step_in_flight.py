"""What a scheduler remembers of a step until its result comes."""

from __future__ import annotations

from dataclasses import dataclass

from modelserve_worker.batch import Asked, Int32Array


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the device has, or that waits for it."""

    step: int
    moves_pages: bool  # or copies some
    renumbers: bool  # pages of anybody
    slots: Int32Array
    sampling: Int32Array  # those of `slots` that get tokens, in order
    drawn: Int32Array  # how many each may get
    asked: Asked  # behind itself
