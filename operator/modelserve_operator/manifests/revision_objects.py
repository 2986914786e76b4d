"""The objects of a revision: its ControllerRevision, the worker's settings, and the Deployment that runs it."""

from __future__ import annotations

from typing import Any

from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.manifests.restricted_pod import COMMIT_KEY
from modelserve_operator.manifests.worker_template import progress_deadline_seconds
from modelserve_operator.observed.snapshot import Body
from modelserve_operator.observed.terminal_failure import FailureRecord
from modelserve_operator.revisions.revision import ENGINE_FILE, Revision


def controller_revision(model_serve: Body, revision: Revision) -> dict[str, Any]:
    """NAME-HASH, the memory of a revision. Its number changes, the model's commit comes later; all else of it stays."""
    metadata = _metadata(model_serve, revision, component=labels.REVISION)
    if known := commit_annotations(revision):
        metadata["annotations"] = known
    return {
        "metadata": metadata,
        "revision": revision.number,
        "data": revision.to_data(model_serve["metadata"]["name"]),
    }


def commit_annotations(revision: Revision) -> dict[str, str]:
    """What keeps the commits of a revision's model and drafters, as far as they are known; of two drafters both, with
    nothing for one that is not."""
    commits = [revision.drafter_commit(number) for number in range(len(revision.drafter_sources))]
    key = labels.DRAFTER_COMMITS if len(commits) > 1 else labels.DRAFTER_COMMIT
    found = {labels.MODEL_COMMIT: revision.commit, key: ",".join(commits) if any(commits) else ""}
    return {each: commit for each, commit in found.items() if commit}


def engine_config_map(model_serve: Body, revision: Revision) -> dict[str, Any]:
    """NAME-HASH: engine.yaml, which the worker mounts. It is rendered from the revision and read by nobody else."""
    return {
        "metadata": _metadata(model_serve, revision, component=labels.REVISION),
        "immutable": True,
        "data": {ENGINE_FILE: revision.engine_yaml},
    }


def commit_config_map(model_serve: Body, *, source: str, commit: str) -> dict[str, Any]:
    """NAME-commit-HASH: the commit of the Hub that every later pod of this address and revision, whose hash `source`
    is, serves."""
    name = labels.commit_name(model_serve["metadata"]["name"], source)
    metadata = child_metadata(model_serve, name=name, component=labels.COMMIT)
    return {"metadata": metadata, "immutable": True, "data": {COMMIT_KEY: commit}}


def deployment(model_serve: Body, revision: Revision, *, replicas: int, record: FailureRecord | None) -> dict[str, Any]:
    """NAME-HASH, from the committed template: a newer operator changes nothing in the pods of an older revision."""
    name = model_serve["metadata"]["name"]
    metadata = _metadata(model_serve, revision, component=labels.WORKER)
    if record is not None:
        metadata["annotations"] = {labels.TERMINAL_FAILURE: record.to_json()}
    return {
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {**labels.selector(name), labels.PLAN_HASH: revision.hash}},
            "progressDeadlineSeconds": progress_deadline_seconds(revision.weight_bytes),
            "revisionHistoryLimit": 0,
            # The template of a revision never changes, so this only matters when somebody else changes it: neither
            # that nor putting it right ends a pod that is ready before another one is.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": revision.template,
        },
    }


def _metadata(model_serve: Body, revision: Revision, *, component: str) -> dict[str, Any]:
    return child_metadata(
        model_serve,
        name=labels.revision_name(model_serve["metadata"]["name"], revision.hash),
        component=component,
        extra_labels={labels.PLAN_HASH: revision.hash},
    )
