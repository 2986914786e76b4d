"""What ready workers say of themselves on /v1/plan, asked once and kept; I/O, but no writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from modelserve.api import CalibrationPages, CalibrationTerm, GpuMemory
from modelserve.measured_speed import MAX_MEASURED, MeasuredSteps
from modelserve_operator.kube import Kube, WorkerUnreachableError
from modelserve_operator.observed import Pod, WorkerReport

logger = logging.getLogger(__name__)
Body = Mapping[str, Any]

ASK_AGAIN = timedelta(seconds=5)
REFRESH = timedelta(minutes=5)  # speed is measured all the time; a worker is asked by the first reconcile after this


class WorkerReports:
    """Reports by pod uid; a worker is asked when it has turned Ready, after a restart, and when REFRESH has passed.

    What it said stays when it does not answer again.
    """

    def __init__(self, kube: Kube, clock: Callable[[], datetime]) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[str, tuple[int, WorkerReport]] = {}  # pod uid -> restarts, report
        self._asked: dict[str, datetime] = {}  # pod uid -> when it was last asked for what is known
        self._silent_since: dict[str, datetime] = {}  # pod uid -> when it was last asked in vain

    def forget(self, uid: str) -> None:
        """A pod is gone."""
        self._known.pop(uid, None)
        self._asked.pop(uid, None)
        self._silent_since.pop(uid, None)

    async def read(self, pods: Iterable[Body]) -> dict[str, WorkerReport]:
        """Reports of the ready workers that answered. All others are asked at once, so that one that hangs costs its
        time-out and not one after the other; it is not asked again for ASK_AGAIN.
        """
        ready = [(Pod.from_body(body), body) for body in pods]
        ready = [(pod, body) for pod, body in ready if pod.plan_hash and pod.ready and not pod.terminating]
        await asyncio.gather(*(self._ask(pod, body) for pod, body in ready if self._due(pod)))
        known = ((pod, self._known.get(pod.uid)) for pod, _ in ready)
        return {pod.uid: entry[1] for pod, entry in known if entry is not None and entry[0] == pod.restarts}

    def _due(self, pod: Pod) -> bool:
        asked = self._silent_since.get(pod.uid)
        if self._known.get(pod.uid, (-1,))[0] == pod.restarts:
            return self._clock() - self._asked[pod.uid] >= REFRESH
        return asked is None or self._clock() - asked >= ASK_AGAIN

    async def _ask(self, pod: Pod, body: Body) -> None:
        try:
            answer = _report(await self._kube.read_worker(body, "/v1/plan"))
        except (WorkerUnreachableError, ValidationError, KeyError, TypeError) as error:
            logger.warning("worker %s did not report its plan: %s", pod.name, error)
            self._silent_since[pod.uid] = self._clock()
        else:
            self._known[pod.uid] = (pod.restarts, answer)
            self._silent_since.pop(pod.uid, None)
        self._asked[pod.uid] = self._clock()


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
    )


def _speed(entries: Any) -> tuple[MeasuredSteps, ...]:
    """Of another shape than ours: nothing, and the rest of the report counts."""
    try:
        return tuple(map(MeasuredSteps.model_validate, list(entries)[:MAX_MEASURED]))
    except (ValidationError, TypeError) as error:
        logger.warning("what a worker says of its speed is ignored: %s", error)
        return ()
