"""What ready workers say of themselves on /v1/plan, asked beside the reconciles and kept; I/O, but no writes.

A worker that cannot be reached costs its time-out, and a NetworkPolicy of a tenant may make that of hundreds: so no
reconcile waits for one, but for a moment when it is asked for the first time. What it says has it reconciled again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pydantic import ValidationError

from modelserve.api import CalibrationPages, CalibrationTerm, GpuMemory
from modelserve.measured_drafts import MeasuredDrafts
from modelserve.measured_speed import MAX_MEASURED, MeasuredSteps
from modelserve.quality.cache_quality import CacheQuality
from modelserve_operator.cluster.kube import Kube, WorkerUnreachableError
from modelserve_operator.observed.snapshot import Pod, WorkerReport
from modelserve_operator.process.work_queue import Key

logger = logging.getLogger(__name__)
Body = Mapping[str, Any]

FIRST_ANSWER_SECONDS = 0.5  # that a reconcile waits; in a cluster that lets us in it takes milliseconds
ASK_AGAIN, LONGEST_SILENCE = timedelta(seconds=5), timedelta(minutes=5)  # doubling between them
SAID_AFTER = 3  # questions in vain: then it is said
AT_ONCE = 64  # workers that are being asked
REFRESH = timedelta(minutes=5)  # speed is measured all the time; a worker is asked by the first reconcile after this


class Answers(NamedTuple):
    """`reports` by pod uid; `silent`: uids of ready pods that do not answer; `again`: seconds until one is asked."""

    reports: dict[str, WorkerReport]
    silent: frozenset[str]
    again: float | None


@dataclass
class _Worker:
    """What is known of one pod."""

    report: WorkerReport | None = None
    restarts: int = -1  # when it said so
    asked: datetime | None = None
    failures: int = 0  # questions in vain, in a row
    question: asyncio.Task[None] | None = None
    awaited: bool = False  # a reconcile waits for the answer

    def known(self, pod: Pod) -> WorkerReport | None:
        """The report of this run of the pod's containers."""
        return self.report if self.restarts == pod.restarts else None

    def due(self, pod: Pod) -> datetime | None:
        """When it is to be asked next; None for now."""
        if self.asked is None:
            return None
        if self.known(pod) is not None:
            return self.asked + REFRESH
        if not self.failures:  # it has restarted since
            return None
        return self.asked + min(ASK_AGAIN * (1 << min(self.failures - 1, 10)), LONGEST_SILENCE)


class WorkerReports:
    """A worker is asked when it has turned Ready, after a restart, and when REFRESH has passed.

    What it said stays when it does not answer again. `told` is called with a ModelServe that is worth another look.
    """

    def __init__(self, kube: Kube, clock: Callable[[], datetime]) -> None:
        self.told: Callable[[Key], None] = _nobody
        self._kube = kube
        self._clock = clock
        self._workers: dict[str, _Worker] = {}  # by pod uid
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def forget(self, uid: str) -> None:
        """A pod is gone."""
        self._workers.pop(uid, None)

    async def read(self, key: Key, pods: Iterable[Body]) -> Answers:
        """What is known of the ready workers among the pods of a ModelServe; those that are due are asked."""
        now = self._clock()
        ready = [(pod, body) for pod, body in ((Pod.from_body(body), body) for body in pods) if _answers(pod)]
        first = []
        for pod, body in ready:
            worker = self._workers.setdefault(pod.uid, _Worker())
            due = worker.due(pod)
            if worker.question is None and (due is None or due <= now):
                worker.awaited = worker.asked is None
                worker.question = asyncio.create_task(self._ask(worker, key, pod, body))
                first += [worker] if worker.awaited else []
        if first:
            await asyncio.wait([each.question for each in first if each.question], timeout=FIRST_ANSWER_SECONDS)
        for worker in first:
            worker.awaited = False
        known = [(pod, self._workers.get(pod.uid) or _Worker()) for pod, _ in ready]
        waits = [worker.due(pod) for pod, worker in known if worker.failures and worker.known(pod) is None]
        return Answers(
            reports={pod.uid: report for pod, worker in known if (report := worker.known(pod)) is not None},
            silent=frozenset(
                pod.uid for pod, worker in known if worker.failures >= SAID_AFTER and worker.known(pod) is None
            ),
            again=min((max(0.1, (due - now).total_seconds()) for due in waits if due is not None), default=None),
        )

    async def _ask(self, worker: _Worker, key: Key, pod: Pod, body: Body) -> None:
        try:
            async with self._at_once:
                answer = _report(await self._kube.read_worker(body, "/v1/plan"))
        except (WorkerUnreachableError, ValidationError, KeyError, TypeError) as error:
            known = worker.known(pod) is not None
            worker.failures += not known
            told = logging.WARNING if worker.failures <= 1 else logging.DEBUG
            logger.log(told, "worker %s/%s does not report its plan, and is asked now and then: %s", *key, error)
            news = not known
        else:
            news = worker.known(pod) != answer
            worker.report, worker.restarts, worker.failures = answer, pod.restarts, 0
        finally:
            worker.asked, worker.question = self._clock(), None
        if news and not worker.awaited and self._workers.get(pod.uid) is worker:
            self.told(key)


def _nobody(_: Key) -> None:
    """Until somebody listens."""


def _answers(pod: Pod) -> bool:
    return bool(pod.plan_hash) and pod.ready and not pod.terminating


def _report(document: Mapping[str, Any]) -> WorkerReport:
    """Read the body of a worker's /v1/plan. Raises KeyError, TypeError or ValidationError for another shape."""
    predicted, measured = document.get("perGpu"), document.get("allocated")
    return WorkerReport(
        max_model_len=int(document["maxModelLen"]),
        predicted=GpuMemory.model_validate(predicted) if predicted else None,
        measured=GpuMemory.model_validate(measured) if measured else None,
        engine_version=str(document.get("engineVersion") or ""),
        terms=tuple(map(CalibrationTerm.model_validate, document.get("terms") or ())),
        pages=tuple(map(CalibrationPages.model_validate, document.get("pages") or ())),
        speed=_speed(document.get("speed") or []),
        drafts=_drafts(document.get("drafts")),
        cache_quality=_cache_quality(document.get("cacheQuality")),
    )


def _drafts(document: Any) -> MeasuredDrafts | None:
    """As `_speed`, of drafts."""
    try:
        return MeasuredDrafts.model_validate(document) if document is not None else None
    except ValidationError as error:
        logger.warning("what a worker says of its drafts is ignored: %s", error)
        return None


def _cache_quality(document: Any) -> CacheQuality | None:
    """As `_speed`, of an 8-bit cache."""
    try:
        return CacheQuality.model_validate(document) if document is not None else None
    except ValidationError as error:
        logger.warning("what a worker says of an 8-bit cache is ignored: %s", error)
        return None


def _speed(entries: Any) -> tuple[MeasuredSteps, ...]:
    """Of another shape than ours: nothing, and the rest of the report counts."""
    try:
        return tuple(map(MeasuredSteps.model_validate, list(entries)[:MAX_MEASURED]))
    except (ValidationError, TypeError) as error:
        logger.warning("what a worker says of its speed is ignored: %s", error)
        return ()
