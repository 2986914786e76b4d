"""How the reading of a model or of its drafter stands, by an inspect Job. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from modelserve_operator import labels
from modelserve_operator.observed.inspection import (
    inspection_failure,
    inspection_trouble,
    left_behind,
    retry_at,
    suspended,
)
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Finding
from modelserve_operator.reasons import Reason
from modelserve_operator.sources import ModelSource


@dataclass(frozen=True)
class Reading:
    """`planned`: what the condition Planned says meanwhile, `ok` None while it may still succeed."""

    source: ModelSource
    planned: Finding
    stalled: Finding | None


def reading_of(observed: Observed, source: ModelSource) -> Reading:
    """The reading of a source whose facts are not known."""
    name, about = labels.inspection_name(observed.name, source.hash), "drafter" if source.drafter else "model"
    failure = inspection_failure(observed, name)
    if failure is None:
        pods = [pod for pod in observed.pods if pod.job == name]
        waits = next((pod.unschedulable or pod.trouble for pod in pods if pod.unschedulable or pod.trouble), None)
        trouble = inspection_trouble(observed, name)
        waits = trouble.message if trouble is not None else suspended(observed, name) or waits
        message = f"Job {name} reads the {about} at {source.uri}" + (f"; {waits}" if waits else ".")
        stalled = Finding(False, trouble.reason, trouble.message) if trouble is not None else None
        return Reading(source, Finding(None, Reason.INSPECTING_MODEL, message), stalled)
    again = f"at {retry_at(observed, name) or observed.now:%Y-%m-%dT%H:%M:%SZ}"
    if (hanging := left_behind(observed, name)) is not None:
        again = f"once its pod {hanging} has ended, which it does not as long as its volume or its node hangs"
    failed = Finding(
        False,
        failure.reason,
        f"{failure.message.rstrip('.')}. It is tried again {again}, or at once when annotation {labels.RETRY}, "
        f"spec.{about} or spec.pod changes.",
    )
    return Reading(source, failed, failed)
