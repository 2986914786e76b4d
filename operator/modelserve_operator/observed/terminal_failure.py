"""Remembers that a revision's workers ended for good, and says when it is tried again. Pure.

The record lies in an annotation of the revision's Deployment. Growth stops while it says so; attempts follow after 1
minute, doubling to 30, and at once when somebody asks for one. Neither a node nor a number of replicas is a reason to
be early: autoscalers write both, and a worker that fails on each new node would have them bring nodes for ever.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from modelserve_operator.observed.snapshot import Failure

FIRST_DELAY = timedelta(minutes=1)
LONGEST_DELAY = timedelta(minutes=30)
FORGOTTEN_AFTER = timedelta(hours=1)  # once as many workers as wanted are ready, be it that fewer are wanted
_LONG_AGO = datetime.fromtimestamp(0, UTC)


def delay_after(attempts: int) -> timedelta:
    """Until the next attempt, when so many have failed in a row."""
    return min(FIRST_DELAY * (1 << min(max(attempts - 1, 0), 10)), LONGEST_DELAY)


@dataclass(frozen=True)
class FailureRecord:
    """The last failure of a revision, and where its attempts stand."""

    failure: Failure
    attempts: int = 1  # of this revision that failed in a row; 0: the first one that somebody asked for
    at: datetime = _LONG_AGO  # of the last failure
    ready: int = 0  # workers that were ready then, or at the failure of one of those since
    asked: str = ""  # digest of what people write to have it tried again, as it was then; empty: not known
    trying: bool = False  # an attempt is under way: growth goes on

    @property
    def retry_at(self) -> datetime:
        return self.at + delay_after(self.attempts)

    def to_json(self) -> str:
        return json.dumps(
            {
                "reason": self.failure.reason,
                "message": self.failure.message,
                "attempts": self.attempts,
                "at": self.at.isoformat(timespec="seconds"),
                "ready": self.ready,
                "asked": self.asked,
                "trying": self.trying,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        """Read what `to_json` wrote; anything else (edited by hand) is a failure that is tried again at once."""
        try:
            document = json.loads(text)
            failure = Failure(str(document["reason"]), str(document["message"]))
        except (ValueError, KeyError, TypeError):
            return cls(Failure("WorkerFailed", text))
        try:
            at = datetime.fromisoformat(document["at"])
            counted = cls(failure, attempts=int(document["attempts"]), at=at if at.tzinfo else at.replace(tzinfo=UTC))
            return replace(
                counted,
                ready=int(document.get("ready") or 0),
                asked=str(document.get("asked") or ""),
                trying=document["trying"] is True,
            )
        except (ValueError, KeyError, TypeError):
            return cls(failure)


def next_record(
    noted: FailureRecord | None, *, seen: Failure | None, ready: int, wanted: int, asked: str | None, now: datetime
) -> FailureRecord | None:
    """`seen`: the failure of a pod that is there now; `asked`: as in the record, None under a spec that is refused.

    An attempt starts when the failed pods are gone, so that an old failure is not taken for a new one. It has succeeded
    when more workers are ready than were at the failure; that fewer are wanted proves nothing of it.
    """
    if seen is not None:
        if noted is not None and not noted.trying:
            return replace(noted, ready=min(noted.ready, ready))
        before = noted or FailureRecord(seen, attempts=0)
        return FailureRecord(seen, before.attempts + 1, now, ready, before.asked if asked is None else asked)
    if noted is None:
        return None
    if ready >= wanted and ((noted.trying and ready > noted.ready) or now - noted.at >= FORGOTTEN_AFTER):
        return None
    if asked is not None and noted.asked not in ("", asked):
        return replace(noted, attempts=0, asked=asked, trying=True)
    return noted if noted.trying or now < noted.retry_at else replace(noted, trying=True)
