"""Bounds how long the masks of a step may take while everybody else in it waits.

What a mask takes depends on the machine, so these bounds decide only who waits for whom, and never which tokens an
answer has.
"""

from __future__ import annotations

from threading import Lock

DEAR_S = 0.004  # of one core, for one mask; a usual one takes 0.05 ms, a list of e-mail addresses 1.5
CHEAP_S = 0.0003  # nobody is to sit out for it: at most 20 ms for 64 answers
STEP_S = 0.025  # of each thread, for the masks of a step; as long as one of its forward passes


class MaskTime:
    """CPU time of the masks that a step waited for, over all of its answers; `threads` compute them."""

    def __init__(self, threads: int = 1) -> None:
        self._most = STEP_S * threads
        self._spent = 0.0
        self._lock = Lock()

    def begin_step(self) -> None:
        self._spent = 0.0

    def is_dear(self, seconds: float) -> bool:
        """Whether an answer whose mask took so long is to have its next ones computed beside the steps of others."""
        with self._lock:
            self._spent += seconds
            return seconds > DEAR_S or (self._spent > self._most and seconds > CHEAP_S)
