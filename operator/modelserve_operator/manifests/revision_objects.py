"""The two objects of a revision: the immutable ConfigMap that is its memory, and the Deployment that runs it."""

from __future__ import annotations

from typing import Any

from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.manifests.worker_template import progress_deadline_seconds
from modelserve_operator.observed import Body
from modelserve_operator.revision import Revision
from modelserve_operator.terminal_failure import FailureRecord


def revision_config_map(model_serve: Body, revision: Revision) -> dict[str, Any]:
    """NAME-HASH: the worker mounts engine.yaml of it; the operator reads the plan and the template back from it."""
    metadata = child_metadata(
        model_serve,
        name=labels.revision_name(model_serve["metadata"]["name"], revision.hash),
        component=labels.REVISION,
        extra_labels={labels.PLAN_HASH: revision.hash, labels.SPEC_HASH: revision.spec_hash},
    )
    if revision.recommitted:
        metadata["annotations"] = {labels.COMMITTED_AT: revision.committed_at}
    return {"metadata": metadata, "immutable": True, "data": revision.to_data()}


def deployment(model_serve: Body, revision: Revision, *, replicas: int, record: FailureRecord | None) -> dict[str, Any]:
    """NAME-HASH, from the committed template: a newer operator changes nothing in the pods of an older revision."""
    name = model_serve["metadata"]["name"]
    identity = {labels.PLAN_HASH: revision.hash}
    metadata = child_metadata(
        model_serve,
        name=labels.revision_name(name, revision.hash),
        component=labels.WORKER,
        extra_labels=identity,
    )
    if record is not None:
        metadata["annotations"] = {labels.TERMINAL_FAILURE: record.to_json()}
    return {
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {**labels.selector(name), **identity}},
            "progressDeadlineSeconds": progress_deadline_seconds(revision.weight_bytes),
            "revisionHistoryLimit": 0,
            # The template of a revision never changes, so this only matters when somebody else changes it: neither
            # that nor putting it right ends a pod that is ready before another one is.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": revision.template,
        },
    }
