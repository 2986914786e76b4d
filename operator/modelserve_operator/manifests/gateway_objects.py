"""The HTTPRoute of a ModelServe, and the InferencePool that it leads to where an endpoint picker chooses workers.

What their schemas would fill in stands here as well.
"""

from __future__ import annotations

from typing import Any

from modelserve.api.gateway import EndpointPicker, GatewaySpec
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import HTTP_ROUTE, INFERENCE_POOL
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.manifests.serving_objects import service
from modelserve_operator.manifests.worker_template import PORT
from modelserve_operator.observed.snapshot import Body


def inference_pool(model_serve: Body, picker: EndpointPicker, *, plan_hash: str | None) -> dict[str, Any]:
    """InferencePool NAME, of the workers that the Service selects."""
    name = model_serve["metadata"]["name"]
    return {
        "metadata": child_metadata(model_serve, name=name, component=labels.GATEWAY),
        "spec": {
            "selector": {"matchLabels": service(model_serve, plan_hash=plan_hash)["spec"]["selector"]},
            "targetPorts": [{"number": PORT}],
            "appProtocol": "http",
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode or "FailClose",
            },
        },
    }


def http_route(model_serve: Body, asked: GatewaySpec) -> dict[str, Any]:
    """HTTPRoute NAME: /v1 to the InferencePool or the Service; no time limit, since answers stream for minutes."""
    name = model_serve["metadata"]["name"]
    parents = [{"group": HTTP_ROUTE.group, "kind": "Gateway", **each.to_json()} for each in asked.parent_refs]
    backend: dict[str, Any] = {"name": name, "weight": 1}
    if asked.endpoint_picker is not None:
        backend |= {"group": INFERENCE_POOL.group, "kind": INFERENCE_POOL.kind}
    else:
        (port,) = service(model_serve, plan_hash=None)["spec"]["ports"]
        backend |= {"group": "", "kind": "Service", "port": port["port"]}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "timeouts": {"request": "0s"},
        "backendRefs": [backend],
    }
    spec: dict[str, Any] = {"parentRefs": parents, "rules": [rule]}
    if asked.hostnames:
        spec["hostnames"] = list(asked.hostnames)
    return {"metadata": child_metadata(model_serve, name=name, component=labels.GATEWAY), "spec": spec}
