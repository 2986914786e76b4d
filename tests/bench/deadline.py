"""What a tool has time for: it ends at its time, and at SIGTERM, with what it has found, and leaves nothing running.

with within(options.deadline) as time: ...   # prints what it finds as it comes
print(table)                                 # of what there is; `time.up` where it is not all
return time.code(faults)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

TIME_IS_UP = 124  # as `timeout` ends
_PR_SET_PDEATHSIG = 1


class TimeIsUpError(BaseException):
    """Nobody is to catch it but `within`: what it passes through ends what it holds."""


@dataclass
class Time:
    began: float = field(default_factory=time.monotonic)
    up: str = ""  # why

    @property
    def seconds(self) -> float:
        """Since the tool began."""
        return time.monotonic() - self.began

    def code(self, faults: Sequence[Any] | bool = ()) -> int:
        """Of the tool's exit."""
        if self.up:
            print(f"not all was measured: {self.up}", flush=True)
        return 1 if faults else TIME_IS_UP if self.up else 0


def add_deadline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="end then, with what was measured by then")


@contextlib.contextmanager
def within(seconds: float | None) -> Iterator[Time]:
    """The block ends early, and quietly, after so many seconds and at SIGTERM. For the main thread."""
    spent = Time()

    def end(number: int, _: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who asks twice does not wait for the first one's end
        spent.up = f"{seconds:g} s are over" if number == signal.SIGALRM else "SIGTERM"
        for child in multiprocessing.active_children():  # a pool would be waited for with all that it has to do
            child.kill()
        raise TimeIsUpError

    before = {number: signal.signal(number, end) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield spent
    except TimeIsUpError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Of a child before it begins: no end of its parent, SIGKILL included, leaves it behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
