"""Turns a refused write into a finding for the ModelServe's status and a time to try again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from modelserve_operator.observed.denials import by_policy, denial
from modelserve_operator.planning.decision import Finding
from modelserve_operator.reasons import Reason

NAME_TAKEN_SECONDS = 30.0
REFUSED_SECONDS = 60.0
INVALID_STATUSES = (400, 422)  # the API server found an object invalid, and would find it so again
FORBIDDEN_STATUS, CONFLICT_STATUS = 403, 409


@dataclass(frozen=True)
class WriteFailure:
    """`of_spec`: the spec leads to it, so it is not accepted. `delay` None: transient, the queue backs off."""

    finding: Finding
    delay: float | None
    of_spec: bool = False


def name_taken(message: str) -> WriteFailure:
    """The other object carries no label of ours, so no event will tell when it goes."""
    return WriteFailure(Finding(False, Reason.NAME_CONFLICT, message), NAME_TAKEN_SECONDS, of_spec=True)


def contested(message: str, *, again: datetime, now: datetime) -> WriteFailure:
    delay = max(0.0, (again - now).total_seconds()) + 0.1
    return WriteFailure(Finding(False, Reason.DRIFT_CONTESTED, message), delay)


def unfit(message: str) -> WriteFailure:
    """No event tells when somebody takes his field away, unless it is on the child."""
    return WriteFailure(Finding(False, Reason.DRIFT_CONTESTED, message), REFUSED_SECONDS)


def refused(status: int, message: str) -> WriteFailure | None:
    """An answer of the API server, by its HTTP status (0: there was none). None for a conflict: the next try settles
    it."""
    if status == CONFLICT_STATUS:
        return None
    denied = status in (*INVALID_STATUSES, FORBIDDEN_STATUS) and by_policy(message)
    if status == FORBIDDEN_STATUS or denied:
        return WriteFailure(Finding(False, denial(message), message), REFUSED_SECONDS)
    if status in INVALID_STATUSES:
        message = f"the API server refuses what the spec leads to: {message}"
        return WriteFailure(Finding(False, Reason.INVALID_SPEC, message), REFUSED_SECONDS, of_spec=True)
    return WriteFailure(Finding(False, Reason.WRITE_FAILED, f"a write failed and is tried again: {message}"), None)
