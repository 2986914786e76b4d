"""Conditions of objects whose status is made anew each time: when each changed last, and what is worth an Event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from modelserve_operator.observed.snapshot import Transition


@dataclass(frozen=True)
class Finding:
    """Of the condition Ready. `stalled`: nothing more happens until somebody changes something, or a try is due."""

    ready: bool
    reason: str
    message: str
    stalled: bool = False


def conditions_of(
    finding: Finding,
    accepted: tuple[bool, str, str] | None,
    before: Mapping[str, Any],
    *,
    generation: int | None,
    now: datetime,
) -> list[dict[str, Any]]:
    """Ready, Accepted (whether, reason, message; None: absent) and kstatus's: Reconciling while it is on its way,
    Stalled while nothing more will happen, each absent otherwise. One that held before keeps its time. `before`: the
    status as it is."""
    wanted = [("Ready", finding.ready, finding.reason, finding.message)]
    if accepted is not None:
        wanted.append(("Accepted", *accepted))
    if not finding.ready:
        wanted.append(("Stalled" if finding.stalled else "Reconciling", True, finding.reason, finding.message))
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
