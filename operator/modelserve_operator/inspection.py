"""The inspection of a model: its Job as it stands, and what it found. Pure; the one place that reads Jobs and facts."""

from __future__ import annotations

from pydantic import ValidationError

from modelserve.model_facts import ModelFacts
from modelserve.published import published_model
from modelserve_operator import labels
from modelserve_operator.manifests.serving_objects import FACTS_KEY
from modelserve_operator.observed import Body, Failure, Observed
from modelserve_operator.reasons import Reason
from modelserve_operator.sources import ModelSource


def known_facts(observed: Observed, source: ModelSource) -> ModelFacts | None:
    """Shipped facts of a published name, else what an earlier inspection stored, else what its Job says just now."""
    known = published_model(source.uri)
    if known is not None:
        return known
    name = labels.model_facts_name(observed.name, source.hash)
    stored = next((body for body in observed.config_maps if body["metadata"]["name"] == name), None)
    if stored is not None:
        return _parse_facts((stored.get("data") or {}).get(FACTS_KEY, ""))
    job = labels.inspection_name(observed.name, source.hash)
    reports = (pod.report for pod in observed.pods if pod.job == job and pod.report)
    return next(filter(None, map(_parse_facts, reports)), None)


def _parse_facts(text: str) -> ModelFacts | None:
    try:
        return ModelFacts.model_validate_json(text)
    except ValidationError:
        return None


def job_named(observed: Observed, name: str) -> Body | None:
    return next((job for job in observed.jobs if job["metadata"]["name"] == name), None)


def _ends(job: Body) -> dict[str, Body]:
    """Conditions of a Job that are true, by type."""
    found = (job.get("status") or {}).get("conditions") or ()
    return {condition["type"]: condition for condition in found if condition.get("status") == "True"}


def inspection_failure(observed: Observed, name: str) -> Failure | None:
    """Why the Job has failed; None while it runs, or when its answer can be read."""
    job = job_named(observed, name)
    if job is None:
        return None
    ends, pods = _ends(job), [pod for pod in observed.pods if pod.job == name]
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


def answer_lost(observed: Observed, name: str) -> bool:
    """Whether the Job has ended well, but the pod that held its answer went before it was read."""
    job = job_named(observed, name)
    return job is not None and "Complete" in _ends(job) and all(pod.job != name for pod in observed.pods)
