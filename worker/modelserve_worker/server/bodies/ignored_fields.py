"""Counting fields that clients sent in vain, and naming each once in the log."""

from __future__ import annotations

import logging
import threading

from prometheus_client import CollectorRegistry, Counter

log = logging.getLogger(__name__)


class IgnoredFields:
    """Counter modelserve_ignored_fields_total by field. Fields are those of field_policy, so labels are bounded."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._counter = Counter(
            "modelserve_ignored_fields",
            "Fields of request bodies that were ignored, since they change nothing here.",
            ["model_name", "field"],
            registry=registry,
        )
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def count(self, field: str, reason: str) -> None:
        """One more; called by any thread."""
        self._counter.labels(self._model_name, field).inc()
        with self._lock:
            is_new = field not in self._known
            self._known.add(field)
        if is_new:
            log.info("clients send the field %r, which is ignored: %s", field, reason)
