"""A CapacityBuffer for workers of the planned shape, and the PodTemplate that has the shape.

Autoscalers make placeholder pods of the template: Cluster Autoscaler by server dry runs, Karpenter in its simulation.
None of them ever runs, so nothing is left of the worker but what decides where it fits and whether it is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.api.capacity_buffer import CapacityBufferSpec
from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.observed.snapshot import WORKER_CONTAINER, Body
from modelserve_operator.revisions.revision import Revision

ACTIVE_CAPACITY = "buffer.x-k8s.io/active-capacity"
_SHAPE = (
    "affinity",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "priorityClassName",
    "runtimeClassName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
)
_CONTAINER = ("name", "image", "imagePullPolicy", "securityContext")


def capacity_buffer(model_serve: Body, asked: CapacityBufferSpec, *, most: int) -> dict[str, Any]:
    """CapacityBuffer NAME. `most`: workers that one which says no number has room for at most, beside its limits."""
    name = model_serve["metadata"]["name"]
    spec: dict[str, Any] = {
        "provisioningStrategy": asked.provisioning_strategy or ACTIVE_CAPACITY,
        "podTemplateRef": {"name": name},
    }
    spec["replicas"] = most if asked.replicas is None else asked.replicas
    if asked.limits:
        spec["limits"] = dict(asked.limits)
    return {"metadata": child_metadata(model_serve, name=name, component=labels.CAPACITY_BUFFER), "spec": spec}


def buffer_template(model_serve: Body, revision: Revision) -> dict[str, Any]:
    """PodTemplate NAME, of the pods of a revision.

    Its pods carry none of our labels: no Service, budget or count of replicas may take a placeholder for a worker. Nor
    do they wait in a queue (Kueue): what is simulated is never admitted.
    """
    name, worker = model_serve["metadata"]["name"], revision.template
    pod = {key: worker["spec"][key] for key in _SHAPE if key in worker["spec"]}
    serve = next(each for each in worker["spec"]["containers"] if each["name"] == WORKER_CONTAINER)
    pod["containers"] = [{key: serve[key] for key in _CONTAINER} | {"resources": _stated(serve["resources"])}]
    # A claim decides on zones; every other volume is made of nothing, or of what every node can fetch.
    claims = [volume for volume in worker["spec"].get("volumes", ()) if "persistentVolumeClaim" in volume]
    if claims:
        pod["volumes"] = claims
    users = {
        key: value
        for key, value in (worker["metadata"].get("labels") or {}).items()
        if key not in labels.child(name, labels.WORKER, **{labels.PLAN_HASH: "", labels.ENGINE_TYPE: ""})
        and not key.startswith(labels.KUEUE)
    }
    metadata: dict[str, Any] = {"annotations": {labels.SAFE_TO_EVICT: "true"}}  # a placeholder holds no node
    if users:
        metadata["labels"] = users
    return {
        "metadata": child_metadata(model_serve, name=name, component=labels.CAPACITY_BUFFER),
        "template": {"metadata": metadata, "spec": pod},
    }


def _stated(resources: Mapping[str, Any]) -> dict[str, Any]:
    """With a request for whatever has a limit: of pods the API server makes one, in a PodTemplate it does not."""
    limits = dict(resources.get("limits") or {})
    return {"requests": {**limits, **(resources.get("requests") or {})}, "limits": limits}
