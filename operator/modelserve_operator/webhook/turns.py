"""Bounds how many reviews are answered at a time: nobody who reaches the port may have others wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 48  # of some 6 ms each: who comes last waits 0.3 s of the second that the API server waits
MOST_OF_ADDRESS = 16  # one API server's crowd of writes; a pod that asks in a loop holds no more of the places


class Turns:
    """Places of reviews that are under way, by the address of who asks."""

    def __init__(self) -> None:
        self._taken = Counter[str]()

    @contextmanager
    def place(self, address: str) -> Iterator[bool]:
        """Whether there is one for as long as the context lasts."""
        free = self._taken.total() < MOST and self._taken[address] < MOST_OF_ADDRESS
        self._taken[address] += free
        try:
            yield free
        finally:
            self._taken[address] -= free
            if not self._taken[address]:
                del self._taken[address]
