"""The access log: one line for each answered request, as text or as JSON; refusals at a bounded rate."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

from modelserve_worker.server.http.request_context import RequestContext

AccessLogFormat = Literal["text", "json", "off"]

_QUIET = frozenset({"/health", "/ready", "/metrics", "/ping", "/load"})  # asked every few seconds, and nobody's request
_REFUSALS_PER_MINUTE = 120  # of one status; a client that is turned away may ask again at once

log = logging.getLogger("modelserve_worker.access")


class AccessLog:
    """Writes to the logger modelserve_worker.access. JSON goes to standard error alone, without a prefix."""

    def __init__(self, form: AccessLogFormat, clock: Callable[[], float] = time.monotonic) -> None:
        self._form, self._clock = form, clock
        self._minutes: dict[int, tuple[float, int]] = {}  # by status: begin of the minute, refusals in it
        if form == "json" and not log.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(message)s"))
            log.addHandler(handler)
            log.propagate = False

    def write(self, context: RequestContext, *, method: str, path: str, status: int) -> None:
        if self._form == "off" or path in _QUIET:
            return
        kept_back = 0
        if status >= 400:
            passes, kept_back = self._count(status)
            if not passes:
                return
        fields = {**context.figures(), **({"kept_back": kept_back} if kept_back else {})}
        if self._form == "json":
            line = {"time": time.time(), "method": method, "path": path[:200], "status": status, **fields}
            log.info("%s", json.dumps(line))
        else:
            told = " ".join(f"{name}={value}" for name, value in fields.items())
            log.info("%s %s %d %s", method, json.dumps(path[:200])[1:-1], status, told)

    def _count(self, status: int) -> tuple[bool, int]:
        """Whether one more refusal is told, and how many were not in the minute before."""
        now = self._clock()
        begun, count = self._minutes.get(status, (now, 0))
        kept_back = 0
        if now - begun >= 60:
            kept_back = max(0, count - _REFUSALS_PER_MINUTE)
            begun, count = now, 0
        self._minutes[status] = (begun, count + 1)
        return count < _REFUSALS_PER_MINUTE, kept_back
