"""Conditions of objects whose status is made anew each time: when each changed last, and what is worth an Event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from modelserve_operator.observed.snapshot import Transition


def with_times(
    wanted: Iterable[tuple[str, bool, str, str]], before: Mapping[str, Any], *, generation: int | None, now: datetime
) -> list[dict[str, Any]]:
    """Conditions of (type, whether it holds, reason, message); one that held before keeps its time. `before`: the
    status as it is."""
    known = {each.get("type"): each for each in before.get("conditions") or ()}
    conditions = []
    for kind, holds, reason, message in wanted:
        text, last = "True" if holds else "False", known.get(kind) or {}
        since = last.get("lastTransitionTime") if last.get("status") == text else None
        condition = {
            "type": kind,
            "status": text,
            "observedGeneration": generation,
            "lastTransitionTime": since or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "reason": str(reason),
            "message": message,
        }
        conditions.append(condition)
    return conditions


def transition_between(before: Mapping[str, Any], status: Mapping[str, Any]) -> Transition | None:
    """The Event of a new status: Ready says something else than before."""
    known, now = _ready(before), _ready(status)
    if (known.get("status"), known.get("reason")) == (now.get("status"), now.get("reason")):
        return None
    stalled = any(each["type"] == "Stalled" for each in status["conditions"])
    return Transition(str(now["reason"]), str(now["message"]), stalled)


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((each for each in status.get("conditions") or () if each.get("type") == "Ready"), {})
