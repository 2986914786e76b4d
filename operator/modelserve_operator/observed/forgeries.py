"""Finds what a Deployment or a pod says of a revision that the operator did not write or tell it. Pure.

Whoever may edit Deployments and pods may write both, so neither is believed: it is told by name, and left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import labels
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.observed.terminal_failure import FailureRecord
from modelserve_operator.revisions.revision import Revision

Body = Mapping[str, Any]

CLOCKS_DIFFER = timedelta(minutes=5)  # at most, between two operators one after the other
COMMIT_SHOWN = 12  # characters
_OWN = frozenset({labels.APPLIED_HASH, labels.ADMITTED, labels.TERMINAL_FAILURE})


def failure_record(deployment: Body, now: datetime) -> FailureRecord | None:
    """The record of a failure that a Deployment carries; None for one of a failure that is yet to come: by it, growth
    would never go on.
    """
    text = labels.annotation_of(deployment, labels.TERMINAL_FAILURE)
    record = FailureRecord.from_json(text) if text else None
    return None if record is None or record.at > now + CLOCKS_DIFFER else record


def refused_annotations(deployments: Iterable[Body], now: datetime) -> Iterator[str]:
    """A sentence for each Deployment with annotations of ours that the operator does not write there."""
    for body in deployments:
        annotations = body["metadata"].get("annotations") or {}
        foreign = {key for key in annotations if key.startswith(f"{labels.GROUP}/")} - _OWN
        if annotations.get(labels.TERMINAL_FAILURE) and failure_record(body, now) is None:
            foreign.add(labels.TERMINAL_FAILURE)
        if foreign:
            name, told = body["metadata"]["name"], ", ".join(sorted(foreign))
            yield f"Deployment {name} carries {told}, not written by the operator: refused, and left as it is."


def differing_commits(revision: Revision, pods: Iterable[Pod]) -> str | None:
    """A sentence about pods of the revision that tell another commit of the model than it keeps."""
    others = sorted((pod.name, pod.commit) for pod in pods if pod.commit and pod.commit != revision.commit)
    if not others or not revision.commit:
        return None
    told = ", ".join(f"pod {name} tells {commit[:COMMIT_SHOWN]}" for name, commit in others)
    kept = revision.commit[:COMMIT_SHOWN]
    return f"Model commits differ: {kept} is the revision's, but {told}. Delete such a pod: the next one serves {kept}."
