"""Progress of loading, and the watchdog that ends a worker whose storage has stopped answering."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason, write_termination

STALL_LIMIT_S = 300.0
LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of this rank; the first never falls."""


def exit_stalled(message: str) -> None:
    """End the process with reason LoadStalled. A thread blocked on storage cannot be interrupted in any gentler way."""
    write_termination(TerminationMessage(reason=TerminationReason.LoadStalled, message=message))
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(TERMINAL_EXIT_CODE)


class LoadProgress:
    """Counts bytes of any number of threads for a callback and the log; as a context manager it also watches that they
    keep coming."""

    def __init__(
        self,
        *,
        callback: ProgressCallback | None = None,
        stall_limit_s: float = STALL_LIMIT_S,
        on_stall: Callable[[str], None] = exit_stalled,
    ) -> None:
        self.total_bytes = 0
        self.done_bytes = 0
        self._callback = callback
        self._stall_limit_s = stall_limit_s
        self._on_stall = on_stall
        self._reading: dict[int, tuple[float, str]] = {}  # by thread: since when, what
        self._lock = threading.Lock()
        self._began_s = self._last_s = time.monotonic()
        self._logged_s = self._began_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="load-watchdog", daemon=True)

    def expect(self, total_bytes: int) -> None:
        """Set what `advance` will add up to."""
        self.total_bytes = total_bytes

    def reading(self, what: str) -> None:
        """Say what this thread reads next, for the message of a stall; getting here is progress."""
        self._last_s = time.monotonic()
        self._reading[threading.get_ident()] = (self._last_s, what)

    def advance(self, count: int) -> None:
        """So many bytes more are there."""
        with self._lock:
            self.done_bytes += count
            self._last_s = time.monotonic()
            if self._last_s - self._logged_s >= LOG_INTERVAL_S:
                self._logged_s = self._last_s
                logger.info("loading: %s", self._state())
            if self._callback is not None:
                self._callback(self.done_bytes, self.total_bytes)

    def _state(self) -> str:
        seconds = max(1e-3, time.monotonic() - self._began_s)
        rate = self.done_bytes / 1e9 / seconds
        return f"{self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB in {seconds:.1f} s, {rate:.2f} GB/s"

    def __enter__(self) -> LoadProgress:
        self._began_s = self._last_s = self._logged_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            logger.info("loaded %s", self._state())

    def _watch(self) -> None:
        while not self._ended.wait(self._stall_limit_s / 20):
            idle_s = time.monotonic() - self._last_s
            if idle_s >= self._stall_limit_s:
                waiting = self._reading.copy().values()
                _, what = min(waiting, default=(0.0, "nothing yet"))  # the one that has waited longest
                self._on_stall(
                    f"loading stalled: no byte for {idle_s:.0f} s (limit {self._stall_limit_s:.0f} s) at "
                    f"{self.done_bytes} of {self.total_bytes} bytes, reading {what}: check the model's storage"
                )
                return
