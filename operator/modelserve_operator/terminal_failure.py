"""What is remembered of a revision whose workers ended for good, and when it is tried again. Pure.

The record lies in an annotation of the revision's Deployment. Growth stops while it says so; attempts follow after 1
minute, doubling to 30, and at once when the spec (replicas included) or a node changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from modelserve_operator.observed import Failure

FIRST_DELAY = timedelta(minutes=1)
LONGEST_DELAY = timedelta(minutes=30)
_LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class FailureRecord:
    """The last failure of a revision, and where its attempts stand."""

    failure: Failure
    attempts: int = 1  # that failed in a row since the spec last changed; 0: the first one after a change
    at: datetime = _LONG_AGO  # of the last failure
    generation: int = 0  # of the ModelServe then
    places: str = ""  # digest of the nodes then
    trying: bool = False  # an attempt is under way: growth goes on

    @property
    def retry_at(self) -> datetime:
        doublings = min(max(self.attempts - 1, 0), 10)
        return self.at + min(FIRST_DELAY * (1 << doublings), LONGEST_DELAY)

    def to_json(self) -> str:
        return json.dumps(
            {
                "reason": self.failure.reason,
                "message": self.failure.message,
                "attempts": self.attempts,
                "at": self.at.isoformat(timespec="seconds"),
                "generation": self.generation,
                "places": self.places,
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
                generation=int(document["generation"]),
                places=str(document["places"]),
                trying=document["trying"] is True,
            )
        except (ValueError, KeyError, TypeError):
            return cls(failure)


def next_record(
    noted: FailureRecord | None,
    *,
    seen: Failure | None,
    complete: bool,
    generation: int,
    places: str,
    now: datetime,
) -> FailureRecord | None:
    """`seen`: the failure of a pod that is there now; `complete`: as many pods as wanted are ready.

    An attempt starts when the failed pods are gone, so that an old failure is not taken for a new one.
    """
    if seen is not None:
        if noted is not None and not noted.trying:
            return noted
        attempts = noted.attempts + 1 if noted is not None and noted.generation == generation else 1
        return FailureRecord(seen, attempts, now, generation, places)
    if noted is None or complete:
        return None
    if noted.generation != generation:
        return replace(noted, attempts=0, generation=generation, places=places, trying=True)
    if noted.trying or (now < noted.retry_at and noted.places == places):
        return noted
    return replace(noted, places=places, trying=True)
