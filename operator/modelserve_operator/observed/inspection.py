"""The inspection of a model: its Job as it stands, and what it found. Pure; the one place that reads Jobs and facts.

A Job has a deadline, so that none runs for ever in silence. What was read counts as soon as the container `inspect` has
ended: containers that somebody else adds may keep its pod for as long as they like.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypeVar

from pydantic import ValidationError

from modelserve.model.model_facts import FACTS_KEY, AssistantFacts, ModelFacts
from modelserve.published import published_model
from modelserve_operator import labels
from modelserve_operator.observed.denials import denial
from modelserve_operator.observed.pod_health import stuck
from modelserve_operator.observed.snapshot import Body, Failure, Observed, Pod, moment
from modelserve_operator.observed.terminal_failure import delay_after
from modelserve_operator.reasons import Reason
from modelserve_operator.sources import ModelSource

POD_PATIENCE = timedelta(seconds=30)  # a Job's controller makes its pod within a second or two
LINGERING = timedelta(minutes=1)  # for containers beside `inspect` to end after it


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
    """Conditions of a Job that are true and tell of its end, by type."""
    found = (job.get("status") or {}).get("conditions") or ()
    true = {condition["type"]: condition for condition in found if condition.get("status") == "True"}
    return {kind: condition for kind, condition in true.items() if kind != "Suspended"}


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
    end = ends.get("Failed") or ends.get("FailureTarget")
    lingering = None if end is not None else _lingering(observed, job)
    if end is None and lingering is None:
        return None
    for pod in pods if lingering is None else (lingering,):
        if pod.failure is not None:
            return pod.failure
    if end is not None and end.get("reason") == "DeadlineExceeded":
        return Failure(Reason.INSPECTION_FAILED, _too_long(job, pods))
    trouble = next((pod.trouble for pod in pods if pod.trouble), None)
    if lingering is not None:
        kept = f"Pod {lingering.name}, {lingering.trouble}; containers beside it keep the pod from ending"
        return Failure(Reason.INSPECTION_FAILED, f"{kept}.")
    return Failure(Reason.INSPECTION_FAILED, f"{trouble or (end or {}).get('message') or 'the Job failed'}.")


def _lingering(observed: Observed, job: Body) -> Pod | None:
    """A pod whose `inspect` has ended for good while it goes on; or ended badly, and the pod has had time to follow."""
    for pod in pods_of(observed, job):
        since = pod.lingers_since
        if since is not None and (pod.failure is not None or observed.now - since >= LINGERING):
            return pod
    return None


def _too_long(job: Body, pods: tuple[Pod, ...]) -> str:
    words = next((each for pod in pods if (each := pod.unschedulable or pod.trouble)), None)
    return (
        f"Job {job['metadata']['name']} did not end within {job['spec'].get('activeDeadlineSeconds')} s"
        f"{f' ({words})' if words else ''}: its volume or the address of the model may not answer, its pod may have "
        "found no node, or its network waits for a sidecar. Labels and annotations of spec.pod reach this pod, to keep "
        "it out of a mesh."
    )


def left_behind(observed: Observed, name: str) -> str | None:
    """A pod of the Job that is deleted and does not end, as on a volume that hangs. Each attempt would leave one more
    on the node, so the next one waits for it, unless somebody asks.
    """
    job = job_named(observed, name)
    if job is None or _asked(observed, job):
        return None
    return next((pod.name for pod in observed.pods if pod.job == name and pod.terminating and not pod.ended), None)


def _asked(observed: Observed, job: Body) -> bool:
    """Whether somebody asks for another attempt since this one was made."""
    return labels.annotation_of(job, labels.RETRY) != labels.annotation_of(observed.model_serve, labels.RETRY)


def suspended(observed: Observed, name: str) -> str | None:
    """Where a queue has not let the Job in: what it waits for, in words."""
    job = job_named(observed, name)
    if job is None or _ends(job) or not (job.get("spec") or {}).get("suspend"):
        return None
    queue = labels.label_of(job, labels.QUEUE_NAME)
    return f"Job {name} waits in Kueue's queue {queue} for quota" if queue else _no_queue(name)


def _no_queue(name: str) -> str:
    return (
        f"Job {name} is suspended and names no queue, so none lets it in: name one in spec.pod.labels "
        f"({labels.QUEUE_NAME}), or exempt the namespace from the queue's rule for all Jobs"
    )


def overdue(job: Body, now: datetime) -> bool:
    """Whether it goes on, and should have had a pod by now."""
    made = moment(job["metadata"].get("creationTimestamp"))
    held = (job.get("spec") or {}).get("suspend")
    return not _ends(job) and not held and made is not None and now - made >= POD_PATIENCE


def inspection_trouble(observed: Observed, name: str) -> Failure | None:
    """Why the Job does not get on, as long as that lasts."""
    job = job_named(observed, name)
    if job is None or _ends(job):
        return None
    if suspended(observed, name) is not None:
        named = labels.label_of(job, labels.QUEUE_NAME) is not None
        return None if named else Failure(Reason.WAITING_FOR_QUOTA, _no_queue(name))
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
    if _asked(observed, job):
        return observed.now
    times = [moment(end.get("lastTransitionTime")) for end in _ends(job).values()]
    lingering = _lingering(observed, job)
    if lingering is not None and lingering.lingers_since is not None:
        times.append(lingering.lingers_since + (timedelta(0) if lingering.failure is not None else LINGERING))
    made = moment(job["metadata"].get("creationTimestamp")) or observed.now
    return max(filter(None, times), default=made) + delay_after(attempts(job))


def seconds_left(observed: Observed, name: str) -> float | None:
    """Seconds until the inspection is to be looked at again by time alone: no event will come then."""
    job = job_named(observed, name)
    if job is None:
        return None
    due = retry_at(observed, name)
    if due is not None and due <= observed.now and left_behind(observed, name) is not None:
        return None  # the end of that pod is an event
    lingers = [pod.lingers_since for pod in pods_of(observed, job) if pod.lingers_since is not None]
    if due is None and lingers:
        due = min(lingers) + LINGERING
    if due is None and not _ends(job) and not pods_of(observed, job):
        due = (moment(job["metadata"].get("creationTimestamp")) or observed.now) + POD_PATIENCE
        if overdue(job, observed.now):
            due = observed.now + POD_PATIENCE  # for the cause
    return None if due is None else max(0.0, (due - observed.now).total_seconds()) + 0.1


def answer_lost(observed: Observed, name: str) -> bool:
    """Whether the Job has ended well, but the pod that held its answer went before it was read."""
    job = job_named(observed, name)
    return job is not None and "Complete" in _ends(job) and not pods_of(observed, job)
