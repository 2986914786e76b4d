"""The inspection of a model: its Job as it stands, and what it found. Pure; the one place that reads Jobs and facts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import ValidationError

from modelserve.model_facts import FACTS_KEY, AssistantFacts, ModelFacts
from modelserve.published import published_model
from modelserve_operator import labels
from modelserve_operator.denials import denial
from modelserve_operator.observed import Body, Failure, Observed, Pod, moment
from modelserve_operator.pod_health import stuck
from modelserve_operator.reasons import Reason
from modelserve_operator.sources import ModelSource
from modelserve_operator.terminal_failure import delay_after

POD_PATIENCE = timedelta(seconds=30)  # a Job's controller makes its pod within a second or two


Facts = TypeVar("Facts", ModelFacts, AssistantFacts)


def known_facts(observed: Observed, source: ModelSource) -> ModelFacts | None:
    """Shipped facts of a published name, else what an earlier inspection stored, else what its Job says just now."""
    return published_model(source.uri) or _inspected(observed, source, ModelFacts)


def known_assistant(observed: Observed, source: ModelSource) -> AssistantFacts | None:
    """The same of an assistant that no release ships."""
    return _inspected(observed, source, AssistantFacts)


def _inspected(observed: Observed, source: ModelSource, kind: type[Facts]) -> Facts | None:
    name = labels.model_facts_name(observed.name, source.hash)
    stored = next((body for body in observed.config_maps if body["metadata"]["name"] == name), None)
    if stored is not None:
        return _parse_facts((stored.get("data") or {}).get(FACTS_KEY, ""), kind)
    job = labels.inspection_name(observed.name, source.hash)
    reports = (pod.report for pod in observed.pods if pod.job == job and pod.report)
    return next(filter(None, (_parse_facts(report, kind) for report in reports)), None)


def _parse_facts(text: str, kind: type[Facts]) -> Facts | None:
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def job_named(observed: Observed, name: str) -> Body | None:
    return next((job for job in observed.jobs if job["metadata"]["name"] == name), None)


def _ends(job: Body) -> dict[str, Body]:
    """Conditions of a Job that are true, by type."""
    found = (job.get("status") or {}).get("conditions") or ()
    return {condition["type"]: condition for condition in found if condition.get("status") == "True"}


def pods_of(observed: Observed, job: Body) -> tuple[Pod, ...]:
    """Its own pods: those of a Job of the same name that was there before may still be about."""
    return tuple(pod for pod in observed.pods if pod.owner == job["metadata"]["uid"])


def inspection_failure(observed: Observed, name: str) -> Failure | None:
    """Why the Job has failed; None while it runs, or when its answer can be read."""
    job = job_named(observed, name)
    if job is None:
        return None
    ends, pods = _ends(job), pods_of(observed, job)
    if "Complete" in ends and any(pod.report for pod in pods):
        message = "the Job's answer cannot be read; a custom spec.image must be of the operator's release"
        return Failure(Reason.INSPECTION_FAILED, message)
    if "Failed" not in ends and "FailureTarget" not in ends:
        return None
    for pod in pods:
        if pod.failure is not None:
            return pod.failure
    trouble = next((pod.trouble for pod in pods if pod.trouble), None)
    end = ends.get("Failed") or ends["FailureTarget"]
    return Failure(Reason.INSPECTION_FAILED, f"{trouble or end.get('message') or 'the Job failed'}.")


def overdue(job: Body, now: datetime) -> bool:
    """Whether it goes on, and should have had a pod by now."""
    made = moment(job["metadata"].get("creationTimestamp"))
    return not _ends(job) and made is not None and now - made >= POD_PATIENCE


def inspection_trouble(observed: Observed, name: str) -> Failure | None:
    """Why the Job does not get on, as long as that lasts."""
    job = job_named(observed, name)
    if job is None or _ends(job):
        return None
    pods = pods_of(observed, job)
    if not pods and overdue(job, observed.now):
        words = observed.causes.get(job["metadata"]["uid"])
        told = words or f"kubectl describe job {name} may tell why"
        return Failure(denial(words) if words else Reason.POD_NOT_STARTING, f"Job {name} gets no pod: {told}")
    hanging = stuck(pods, observed.now)
    return Failure(hanging[0], f"Pod {hanging[1].name}, {hanging[1].trouble}") if hanging is not None else None


def attempts(job: Body) -> int:
    """How many Jobs were made in a row, this one counted."""
    text = labels.annotation_of(job, labels.ATTEMPTS) or ""
    return int(text) if text.isdigit() else 1


def retry_at(observed: Observed, name: str) -> datetime | None:
    """When a Job that has failed is made anew; None where there is none."""
    job = job_named(observed, name)
    if job is None or inspection_failure(observed, name) is None:
        return None
    if labels.annotation_of(job, labels.RETRY) != labels.annotation_of(observed.model_serve, labels.RETRY):
        return observed.now  # somebody asks for it
    times = (moment(end.get("lastTransitionTime")) for end in _ends(job).values())
    made = moment(job["metadata"].get("creationTimestamp")) or observed.now
    return max(filter(None, times), default=made) + delay_after(attempts(job))


def seconds_left(observed: Observed, name: str) -> float | None:
    """Seconds until the inspection is to be looked at again by time alone: no event will come then."""
    job = job_named(observed, name)
    if job is None:
        return None
    due = retry_at(observed, name)
    if due is None and not _ends(job) and not pods_of(observed, job):
        due = (moment(job["metadata"].get("creationTimestamp")) or observed.now) + POD_PATIENCE
        if overdue(job, observed.now):
            due = observed.now + POD_PATIENCE  # for the cause
    return None if due is None else max(0.0, (due - observed.now).total_seconds()) + 0.1


def answer_lost(observed: Observed, name: str) -> bool:
    """Whether the Job has ended well, but the pod that held its answer went before it was read."""
    job = job_named(observed, name)
    return job is not None and "Complete" in _ends(job) and not pods_of(observed, job)
