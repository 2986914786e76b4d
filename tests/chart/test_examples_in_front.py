"""docs/examples/front: what stands before a ModelServe names what the operator makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from modelserve.api import ModelServe
from modelserve_operator.manifests.serving_objects import service

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "docs" / "examples" / "front"
MADE = service({"metadata": {"name": "gemma", "namespace": "ml", "uid": "u"}}, plan_hash=None)


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FRONT / name).read_text()))


def test_routes_lead_to_the_service_and_wait_for_streams() -> None:
    (ingress,) = _documents("ingress.yaml")
    (port,) = MADE["spec"]["ports"]
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": MADE["metadata"]["name"], "port": {"name": port["name"]}}
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    gateway, route = _documents("httproute.yaml")
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": MADE["metadata"]["name"], "port": port["port"]}]
    assert rule["timeouts"] == {"request": "0s"}
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    assert gateway["spec"]["listeners"][0]["protocol"] == "HTTPS"


def test_the_api_key_is_a_field_of_the_resource() -> None:
    (document,) = _documents("api-key.yaml")
    reference = ModelServe.parse({**document, "metadata": {**document["metadata"], "namespace": "ml"}}).spec
    assert reference.api_key_secret_ref is not None
    assert (reference.api_key_secret_ref.name, reference.api_key_secret_ref.key) == ("gemma-api-key", "token")


def test_the_autoscaler_follows_the_recorded_rule() -> None:
    (autoscaler,) = _documents("hpa.yaml")
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == ("serving.modelserve.dev/v1alpha1", "ModelServe")
    rules = yaml.safe_load((ROOT / "charts" / "modelserve" / "files" / "rules.yaml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in {name.replace(":", "_") for name in recorded}
    assert all(name in (FRONT / "hpa.yaml").read_text() for name in recorded)


def test_the_target_per_worker_is_four_fifths_of_the_one_that_the_plan_states() -> None:
    text = (FRONT / "hpa-pods.yaml").read_text()
    (autoscaler,) = _documents("hpa-pods.yaml")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in text.partition("rules:")[2].partition("metricsQuery")[0]
    stated = next(int(word.rstrip("),")) for word in text.partition("here ")[2].split())
    assert metric["pods"]["target"]["averageValue"] == f"{800 * stated}m"


def test_scaled_objects_aim_at_the_modelserve_and_only_one_with_an_interceptor_leaves_none() -> None:
    (by_metric,) = _documents("keda.yaml")
    route, by_requests = _documents("keda-http.yaml")
    assert [each["spec"]["minReplicaCount"] for each in (by_metric, by_requests)] == [1, 0]
    for scaled in (by_metric, by_requests):
        target = scaled["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == ("serving.modelserve.dev/v1alpha1", "ModelServe")
    assert "modelserve:replicas_filled" in by_metric["spec"]["triggers"][0]["metadata"]["query"]
    assert by_requests["spec"]["triggers"][0]["metadata"]["interceptorRoute"] == route["metadata"]["name"]
    assert route["spec"]["target"] == {"service": MADE["metadata"]["name"], "port": MADE["spec"]["ports"][0]["port"]}
