"""Stop strings in a stream of text, which may begin in one piece and end in a later one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string lies in the text searched."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The match that is complete first; of those that end together, the longest."""
    matches = [StopMatch(at, at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


class StopStringFilter:
    """Passes text through, holding back an end that may become a stop string, and cuts the text at the first match."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that certainly precedes any stop string. Once one is found, `matched` is set and the stream is over."""
        if not self._stops:
            return text
        pending = self._held + text
        match = find_stop(pending, self._stops)
        if match is not None:
            self._held, self.matched = "", match.stop
            return pending[: match.end if self._include_stop else match.start]
        keep = self._undecided(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
