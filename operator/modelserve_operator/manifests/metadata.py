"""The metadata that all children share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_SERVE


def owner_reference(model_serve: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the garbage collector delete the child with its owner, whether or not the operator runs."""
    return {
        "apiVersion": MODEL_SERVE.api_version,
        "kind": MODEL_SERVE.kind,
        "name": model_serve["metadata"]["name"],
        "uid": model_serve["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child_metadata(
    model_serve: Mapping[str, Any], *, name: str, component: str, extra_labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    owner = model_serve["metadata"]
    return {
        "name": name,
        "namespace": owner["namespace"],
        "labels": labels.child(owner["name"], component, **(extra_labels or {})),
        "ownerReferences": [owner_reference(model_serve)],
    }
