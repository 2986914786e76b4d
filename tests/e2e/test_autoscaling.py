"""A HorizontalPodAutoscaler scales a ModelServe by what its workers tell of their requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster import audit
from localcluster.custom_metrics import METRIC, custom_metrics
from localcluster.deployment import NAME_LABEL, Deployed, apply_example
from localcluster.kubectl import condition, wait_for
from localcluster.operator_process import OperatorProcess
from localcluster.settings import REPOSITORY
from localcluster.target import Target
from localcluster.traffic import traffic_to

NAMESPACE = "modelserve-e2e"
AUTOSCALER = REPOSITORY / "docs" / "examples" / "front" / "hpa-pods.yaml"
CONTROLLER = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"


@pytest.fixture
def metrics(cluster: Target, tmp_path: Path) -> Iterator[None]:
    if cluster.local is None:
        pytest.skip("an API of the whole cluster is registered, which KUBECONFIG's may have from somebody else")
    with custom_metrics(cluster, cluster.local, namespace=NAMESPACE, folder=tmp_path):
        yield


def _autoscaler(served: Deployed) -> dict[str, Any]:
    """The documented manifest for this ModelServe, with the target of its plan, at most two workers, less patience."""
    document: dict[str, Any] = yaml.safe_load(AUTOSCALER.read_text())
    document["metadata"]["name"] = document["spec"]["scaleTargetRef"]["name"] = served.name
    (metric,) = document["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == METRIC
    target = served.status()["plan"]["targetConcurrency"]
    metric["pods"]["target"]["averageValue"] = f"{800 * target}m"
    document["spec"]["maxReplicas"] = 2
    document["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 6
    return document


def _pods(served: Deployed) -> set[str]:
    """Workers that are not on their way out."""
    workers = served.kubectl.items("pods", "-l", f"{NAME_LABEL}={served.name},app.kubernetes.io/component=worker")
    return {pod["metadata"]["uid"] for pod in workers if "deletionTimestamp" not in pod["metadata"]}


def test_workers_follow_the_requests_up_and_down_and_no_request_fails(
    cluster: Target, tiny: Deployed, operator: OperatorProcess, metrics: None
) -> None:
    served = apply_example(cluster, NAMESPACE, "busy", engine={"maxNumSeqs": 4})
    served.wait_ready()
    assert served.status()["plan"]["targetConcurrency"] == 4
    first, bystanders, revision = _pods(served), _pods(tiny), served.status()["revision"]
    kubectl = served.kubectl
    kubectl.apply(_autoscaler(served), _autoscaler(tiny))
    try:
        with traffic_to(served, newcomers=1) as light:  # less than one worker is planned for; it goes on to the end
            wait_for("both are measured", lambda: all(_active(each) for each in (served, tiny)))
            assert _pods(served) == first
            with traffic_to(served, clients=12) as load:
                wait_for("two ready workers", lambda: served.status().get("readyReplicas") == 2)
                assert first < _pods(served), "the first worker keeps running"
            wait_for("one worker", lambda: len(_pods(served)) == 1 and served.status()["replicas"] == 1)
            light.wait_for_answers()
        assert (load.errors, light.errors) == ([], [])
        assert load.answered > 12
    finally:
        kubectl.delete("hpa", served.name, tiny.name)
    served.wait_ready()
    assert served.status()["revision"] == revision, "a number of replicas is no other plan"
    assert served.resource()["spec"]["replicas"] == 1
    assert _pods(tiny) == bystanders
    scaled = {each["objectRef"]["name"] for each in audit.requests(cluster.layout, CONTROLLER) if _scales(each)}
    assert scaled == {served.name}, "whose requests are few is not written to"
    kubectl.delete("modelserve", served.name)


def _active(served: Deployed) -> bool:
    return condition(served.kubectl.get("hpa", served.name), "ScalingActive").get("status") == "True"


def _scales(entry: dict[str, Any]) -> bool:
    reference = entry.get("objectRef") or {}
    return reference.get("resource") == "modelserves" and reference.get("subresource") == "scale"
