"""What stands in front of a ModelServe, by the real CRDs of the Gateway API, its inference extension and KEDA."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from localcluster.binaries import module_folder
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.settings import REPOSITORY
from modelserve.api import ModelServe
from modelserve_operator.cluster.kinds import HTTP_ROUTE, INFERENCE_POOL
from modelserve_operator.cluster.kube import ClusterKube
from modelserve_operator.cluster.store import Store
from modelserve_operator.manifests.gateway_objects import http_route, inference_pool
from modelserve_operator.writing.apply import Applier

pytestmark = pytest.mark.e2e

FRONT = REPOSITORY / "docs" / "examples" / "front"
CRDS = {
    "sigs.k8s.io/gateway-api": "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    "github.com/kedacore/keda/v2": "config/crd/bases/keda.sh_scaledobjects.yaml",
    "sigs.k8s.io/gateway-api-inference-extension": "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
}
DOCUMENT = {
    "apiVersion": "serving.modelserve.dev/v1alpha1",
    "kind": "ModelServe",
    "metadata": {"name": "routed", "namespace": "default"},
    "spec": {
        "model": {"uri": "hf://google/gemma-4-31B-it"},
        "gateway": {
            "parentRefs": [{"name": "inference-gateway", "namespace": "gateways", "sectionName": "https"}],
            "hostnames": ["gemma.example.com", "*.models.example.com"],
            "endpointPicker": {"name": "gemma-epp", "port": 9002},
        },
    },
}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        for module, path in CRDS.items():
            document = (module_folder("gateway", module) / path).read_text()
            found.kubectl.run("apply", "--server-side", "-f", "-", document=document)
        found.kubectl.run("wait", "--for=condition=Established", "crd", "--all", "--timeout=300s")
        found.kubectl.run("apply", "-f", "-", document=json.dumps(DOCUMENT))
        yield found


async def _write(plane: ControlPlane, *objects: tuple[Any, dict[str, Any]]) -> list[str]:
    """Apply each as the operator does; their versions afterwards."""
    async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
        applier = Applier(kube, Store())
        for kind, body in objects:
            await applier.apply(kind, body)
    stored = [plane.kubectl.get(kind.plural, "routed", "-n", "default") for kind, _ in objects]
    return [each["metadata"]["resourceVersion"] for each in stored]


def test_the_real_crds_accept_them_and_fill_in_nothing_that_is_written_again(plane: ControlPlane) -> None:
    owner = plane.kubectl.get("modelserve", "routed", "-n", "default")
    asked = ModelServe.parse(DOCUMENT).spec.gateway
    assert asked is not None
    assert asked.endpoint_picker is not None
    pool = (INFERENCE_POOL, inference_pool(owner, asked.endpoint_picker, plan_hash="0123456789"))
    route = (HTTP_ROUTE, http_route(owner, asked))
    assert asyncio.run(_write(plane, pool, route)) == asyncio.run(_write(plane, pool, route))
    made = plane.kubectl.get(HTTP_ROUTE.plural, "routed", "-n", "default")["spec"]
    assert made["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"

    both = (INFERENCE_POOL, inference_pool(owner, asked.endpoint_picker, plan_hash=None))
    plain = (HTTP_ROUTE, http_route(owner, asked.model_copy(update={"endpoint_picker": None})))
    assert asyncio.run(_write(plane, both, plain)) == asyncio.run(_write(plane, both, plain))
    selector = plane.kubectl.get(INFERENCE_POOL.plural, "routed", "-n", "default")["spec"]["selector"]["matchLabels"]
    assert "serving.modelserve.dev/plan-hash" not in selector, "a key that is no longer wanted goes"
    made = plane.kubectl.get(HTTP_ROUTE.plural, "routed", "-n", "default")["spec"]
    (backend,) = made["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"], backend["port"]) == ("Service", "routed", 80)


def test_the_examples_are_accepted(plane: ControlPlane) -> None:
    """But for the kinds whose CRD is not to be had here: Gateway and InterceptorRoute."""
    seen = []
    for name in ("httproute", "keda", "keda-http", "hpa", "hpa-pods"):
        for document in yaml.safe_load_all((FRONT / f"{name}.yaml").read_text()):
            if document["kind"] not in ("Gateway", "InterceptorRoute"):
                line = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
                plane.kubectl.run(*line, document=json.dumps(document))
                seen.append(document["kind"])
    assert seen == ["HTTPRoute", "ScaledObject", "ScaledObject", *["HorizontalPodAutoscaler"] * 2]
