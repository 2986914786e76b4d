"""The frozen snapshot that one reconcile of a ModelCache decides on. Everything in it was read by
`modelserve_operator.gathering.cache_gatherer`; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from modelserve.caches.model_cache import FilledStatus, ModelCacheSpec
from modelserve.caches.reports import CacheProgress, FilledCache, UnfilledCache, read_end
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import FETCH_CONTAINER, Pod, moment
from modelserve_operator.process.work_queue import Key
from modelserve_operator.sources import filled_status

Body = Mapping[str, Any]
FILL, FREE = "fill", "free"


@dataclass(frozen=True)
class CacheJob:
    """A Job of the cache, with its pods. `end`: what the last of them told; `progress`: what one that runs tells."""

    body: Body
    pods: tuple[Pod, ...] = ()
    end: FilledCache | UnfilledCache | None = None
    progress: CacheProgress | None = None

    @property
    def task(self) -> str:
        """FILL or FREE."""
        return labels.label_of(self.body, labels.CACHE_TASK) or ""

    @property
    def asked(self) -> str:
        """Digest of what it was made for."""
        return labels.annotation_of(self.body, labels.ASKED) or ""

    @property
    def attempts(self) -> int:
        """How many were made in a row, this one counted."""
        text = labels.annotation_of(self.body, labels.ATTEMPTS) or ""
        return int(text) if text.isdigit() else 1

    @property
    def complete(self) -> bool:
        """Whether it ended well."""
        return "Complete" in self._ends

    @property
    def failed_at(self) -> datetime | None:
        """When it ended badly; None while it runs, and of one that ended well."""
        end = self._ends.get("Failed")
        return (moment(end.get("lastTransitionTime")) or datetime.min) if end is not None else None

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.complete or "Failed" in self._ends

    @property
    def trouble(self) -> str | None:
        """Why its pod does not get on, in the scheduler's or the kubelet's words."""
        return next((each for pod in self.pods if (each := pod.unschedulable or pod.trouble)), None)

    @property
    def failure(self) -> str:
        """What the Job says of its end, in words."""
        end = self._ends.get("Failed") or {}
        return str(self.trouble or end.get("message") or "the Job failed")

    @property
    def _ends(self) -> dict[str, Body]:
        found = (self.body.get("status") or {}).get("conditions") or ()
        return {each["type"]: each for each in found if each.get("status") == "True"}


def end_of(pods: Iterable[Body]) -> FilledCache | UnfilledCache | None:
    """What the last pod of a Job told when it ended."""
    newest = sorted(pods, key=lambda body: str(body["metadata"].get("creationTimestamp") or ""), reverse=True)
    for body in newest:
        for container in (body.get("status") or {}).get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated") or {}
            if container.get("name") == FETCH_CONTAINER and (end := read_end(str(ended.get("message") or ""))):
                return end
    return None


@dataclass(frozen=True)
class CacheSnapshot:
    """One ModelCache, and what bears on it. `spec` None: it is invalid, as `fault` says.

    `users`: names of the ModelServes that name it, or whose pods read it; `used`: commits that kept revisions of any of
    them serve. `others`: Jobs of other caches that fetch. `claim`: the claim of its storage.
    """

    key: Key
    body: Body
    spec: ModelCacheSpec | None
    fault: str = ""
    jobs: tuple[CacheJob, ...] = ()
    claim: Body | None = None
    users: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    others: int = 0
    now: datetime = field(default=datetime.min)

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def leaving(self) -> bool:
        """Whether it is being deleted."""
        return bool(self.body["metadata"].get("deletionTimestamp"))

    @property
    def held(self) -> bool:
        """Whether its deletion waits for us."""
        return labels.FREE_CACHE in (self.body["metadata"].get("finalizers") or ())

    @property
    def status(self) -> Body:
        return self.body.get("status") or {}

    @property
    def filled(self) -> FilledStatus | None:
        """What is there and complete, as the status keeps it."""
        return filled_status(self.body)

    @property
    def retry(self) -> str | None:
        """By which somebody asks for another look; every file is verified then."""
        return labels.annotation_of(self.body, labels.RETRY)

    def tasks(self, task: str) -> tuple[CacheJob, ...]:
        """Jobs of one kind, the newest first."""
        found = [job for job in self.jobs if job.task == task]
        return tuple(sorted(found, key=lambda job: str(job.body["metadata"].get("creationTimestamp")), reverse=True))
