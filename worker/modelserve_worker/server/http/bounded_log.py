"""A log that clients cannot fill: of each message a few a minute, then how many more there were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_MINUTE_S = 60.0


class BoundedLog(logging.Filter):
    """Passes `per_minute` records of each message, told apart by logger and format; tells how many it kept back."""

    def __init__(self, per_minute: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._per_minute, self._clock = per_minute, clock
        self._minutes: dict[tuple[str, str], tuple[float, int]] = {}  # begin of the minute, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        if len(self._minutes) > 1000:  # formats are few; text that is no format would fill memory instead
            self._minutes.clear()
        key = (record.name, str(record.msg)[:200])
        now = self._clock()
        begun, count = self._minutes.get(key, (now, 0))
        if now - begun >= _MINUTE_S:
            kept_back = count - self._per_minute
            if kept_back > 0:
                record.msg = f"{record.msg} (and {kept_back} more since the last one)"
            begun, count = now, 0
        self._minutes[key] = (begun, count + 1)
        return count < self._per_minute


def bound_logs() -> None:
    """Bound what a client can cause: the HTTP parser's complaints, the event loop's, and those of connections."""
    bound = BoundedLog()
    for name in (
        "uvicorn.error",
        "asyncio",
        "modelserve_worker.server.http.connections",
        "modelserve_worker.server.http.entrance",
    ):
        logging.getLogger(name).addFilter(bound)
