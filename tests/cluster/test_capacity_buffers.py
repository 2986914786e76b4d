"""A CapacityBuffer in a real API server, by the CRD that Karpenter brings: what is written is accepted, and placeholder
pods of its template are admitted where workers are: under Pod Security, quota and limits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from localcluster.binaries import module_folder
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import KubectlError
from localcluster.settings import ClusterError
from modelserve.api import ModelServe
from modelserve.published import published_model
from modelserve_operator.cluster.kinds import CAPACITY_BUFFER, POD_TEMPLATE
from modelserve_operator.cluster.kube import ClusterKube
from modelserve_operator.cluster.store import Store
from modelserve_operator.inventory.pools import Pool
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.buffer_objects import buffer_template, capacity_buffer
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.settings import Settings
from modelserve_operator.sources import model_source
from modelserve_operator.writing.apply import Applier

pytestmark = pytest.mark.e2e

URI = "hf://google/gemma-4-31B-it"
NAMESPACE = "models"
DOCUMENT = {
    "apiVersion": "serving.modelserve.dev/v1alpha1",
    "kind": "ModelServe",
    "metadata": {"name": "big", "namespace": NAMESPACE},
    "spec": {
        "model": {"uri": URI},
        "storage": {"pvcName": "cache"},
        "capacityBuffer": {"replicas": 2, "limits": {"nvidia.com/gpu": "4"}},
    },
}
ENVIRONMENT = """
apiVersion: v1
kind: Namespace
metadata: {name: models, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: LimitRange
metadata: {name: sizes, namespace: models}
spec:
  limits:
    - type: Container
      default: {memory: 512Mi, cpu: 500m}
      defaultRequest: {memory: 256Mi, cpu: 100m}
      min: {memory: 64Mi, cpu: 10m}
      max: {memory: 512Gi, cpu: "64"}
---
apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus, namespace: models}
spec:
  hard: {requests.nvidia.com/gpu: "1", requests.memory: 128Gi, limits.memory: 256Gi, requests.cpu: "64", pods: "9"}
"""


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server with the CRD, and a namespace that is as strict as namespaces are."""
    try:
        crds = module_folder("karpenter", "sigs.k8s.io/karpenter") / "pkg/apis/crds"
    except ClusterError as error:
        pytest.skip(str(error))
    with control_plane() as found:
        crd = (crds / "autoscaling.x-k8s.io_capacitybuffers.yaml").read_text()
        found.kubectl.run("apply", "--server-side", "-f", "-", document=crd)
        found.kubectl.run("wait", "--for=condition=Established", "crd/capacitybuffers.autoscaling.x-k8s.io")
        found.kubectl.run("apply", "-f", "-", document=ENVIRONMENT)
        quota = found.kubectl.get("resourcequota", "gpus", "-n", NAMESPACE)  # no controller here counts what is used
        hard = quota["spec"]["hard"]
        status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
        _patch_quota(found, status)
        found.kubectl.run("apply", "-f", "-", document=json.dumps(DOCUMENT))
        yield found


def _patch_quota(plane: ControlPlane, status: dict[str, Any]) -> None:
    line = ("patch", "resourcequota", "gpus", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p")
    plane.kubectl.run(*line, json.dumps(status))


def _objects(plane: ControlPlane) -> tuple[dict[str, Any], dict[str, Any]]:
    owner, spec, facts = plane.kubectl.get("modelserve", "big", "-n", NAMESPACE), _spec(), published_model(URI)
    assert facts is not None
    assert spec.capacity_buffer is not None
    pool = Pool((("nvidia.com/gpu.product", "NVIDIA-H200"),), resources=(("nvidia.com/gpu", "8"),))
    plan = plan_for(spec, facts, Supply(pools=(pool,)))
    builder = RevisionBuilder(spec, "big", model_source(spec), facts, Settings(worker_image="worker:test"))
    return buffer_template(owner, builder.proposed(plan)), capacity_buffer(owner, spec.capacity_buffer, most=100)


def _spec() -> Any:
    return ModelServe.parse(DOCUMENT).spec


@pytest.fixture(scope="module")
def written(plane: ControlPlane) -> dict[str, Any]:
    """Both objects, as the operator writes them; the PodTemplate as it is stored."""
    template, buffer = _objects(plane)

    async def write() -> None:
        async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
            applier = Applier(kube, Store())
            for _ in range(2):  # the second time there is nothing to write
                await applier.apply(POD_TEMPLATE, template)
                await applier.apply(CAPACITY_BUFFER, buffer)
                versions = [
                    plane.kubectl.get(kind, "big", "-n", NAMESPACE)["metadata"]["resourceVersion"]
                    for kind in ("podtemplate", "capacitybuffer")
                ]
                seen.append(versions)

    seen: list[list[str]] = []
    asyncio.run(write())
    assert seen[0] == seen[1], "what the API server fills in is no reason to write again"
    return dict(plane.kubectl.get("podtemplate", "big", "-n", NAMESPACE))


def test_the_real_crd_accepts_it(plane: ControlPlane, written: dict[str, Any]) -> None:
    stored = plane.kubectl.get("capacitybuffer", "big", "-n", NAMESPACE)
    assert stored["apiVersion"] == "autoscaling.x-k8s.io/v1beta1"
    assert stored["spec"]["podTemplateRef"] == {"name": written["metadata"]["name"]}
    assert stored["spec"]["replicas"] == 2


def test_the_real_crd_refuses_one_without_a_size(plane: ControlPlane) -> None:
    """So ours has to be refused before: by the same rule in the ModelServe's own CRD."""
    bare = {"metadata": {"name": "bare", "namespace": NAMESPACE}, "spec": {"podTemplateRef": {"name": "big"}}}
    body = {"apiVersion": CAPACITY_BUFFER.api_version, "kind": "CapacityBuffer", **bare}
    with pytest.raises(KubectlError, match="replicas or limits"):
        plane.kubectl.run("create", "-f", "-", document=json.dumps(body))
    spec: dict[str, Any] = {"model": {"uri": URI}, "capacityBuffer": {}}
    served = {**DOCUMENT, "metadata": {"name": "bare", "namespace": NAMESPACE}, "spec": spec}
    with pytest.raises(KubectlError, match="capacityBuffer needs replicas or limits"):
        plane.kubectl.run("create", "-f", "-", document=json.dumps(served))


def _dry_run(
    plane: ControlPlane, template: dict[str, Any], change: Callable[[dict[str, Any]], None] | None = None
) -> Any:
    """As an autoscaler makes a placeholder pod of it: the pod as admission leaves it."""
    pod = json.loads(json.dumps({**template, "apiVersion": "v1", "kind": "Pod"}))
    pod["metadata"] = {**(pod.get("metadata") or {}), "generateName": "placeholder-", "namespace": NAMESPACE}
    if change is not None:
        change(pod)
    line = ("create", "--dry-run=server", "-o", "yaml", "-f", "-")
    return yaml.safe_load(plane.kubectl.run(*line, document=json.dumps(pod)))


def test_a_placeholder_is_admitted_where_a_worker_is(plane: ControlPlane, written: dict[str, Any]) -> None:
    pod = _dry_run(plane, written["template"])
    (worker,) = pod["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert worker["resources"]["limits"]["memory"] != "512Mi", "the LimitRange's default is for who states none"
    assert "serving.modelserve.dev/name" not in (pod["metadata"].get("labels") or {}), "nobody takes it for a worker"
    assert plane.kubectl.items("pods", "-n", NAMESPACE) == []


def test_what_admission_would_refuse_is_refused_here(plane: ControlPlane, written: dict[str, Any]) -> None:
    """The namespace is as strict as the test above needs it to be."""

    def privileged(pod: dict[str, Any]) -> None:
        del pod["spec"]["containers"][0]["securityContext"]

    def two(pod: dict[str, Any]) -> None:
        for side in pod["spec"]["containers"][0]["resources"].values():
            side["nvidia.com/gpu"] = "2"

    with pytest.raises(KubectlError, match="violates PodSecurity"):
        _dry_run(plane, written["template"], privileged)
    with pytest.raises(KubectlError, match="exceeded quota: gpus"):
        _dry_run(plane, written["template"], two)


def test_an_unknown_group_is_a_404_which_the_operator_takes_for_absent(plane: ControlPlane) -> None:
    with pytest.raises(KubectlError, match="could not find the requested resource"):
        plane.kubectl.run("get", "--raw", "/apis/autoscaling.x-k8s.io/v1alpha1/capacitybuffers")
