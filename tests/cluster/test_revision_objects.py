"""Revisions in a real API server: what is read is what was written, data never changes, and who may write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import KubectlError
from modelserve.api import ModelServe
from modelserve.published import published_model
from modelserve_operator.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT
from modelserve_operator.cluster.kube import ClusterKube, KubeError
from modelserve_operator.cluster.store import Store
from modelserve_operator.inventory.pools import Pool
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.revision_objects import controller_revision, deployment, engine_config_map
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.revisions.revision import Revision, bare, revision_of
from modelserve_operator.settings import Settings
from modelserve_operator.sources import model_source
from modelserve_operator.writing.apply import Applier

pytestmark = pytest.mark.e2e

URI = "hf://google/gemma-4-31B-it"
DOCUMENT: dict[str, Any] = {
    "apiVersion": "serving.modelserve.dev/v1alpha1",
    "kind": "ModelServe",
    "metadata": {"name": "big", "namespace": "default"},
    "spec": {"model": {"uri": URI}, "pod": {"env": [{"name": "TEXT", "value": "<ä & \u2028>"}]}},
}
BINDING = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: tenant-%(role)s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:aggregate-to-%(role)s"}
subjects: [{kind: User, name: tenant}]
"""


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        yield found


@pytest.fixture(scope="module")
def owner(plane: ControlPlane) -> dict[str, Any]:
    plane.kubectl.run("apply", "-f", "-", document=json.dumps(DOCUMENT))
    return dict(plane.kubectl.get("modelserve", "big", "-n", "default"))


def _revision(document: dict[str, Any] = DOCUMENT) -> Revision:
    spec = ModelServe.parse(document).spec
    facts = published_model(URI)
    assert facts is not None
    pool = Pool((("nvidia.com/gpu.product", "NVIDIA-H200"),), resources=(("nvidia.com/gpu", "8"),))
    plan = plan_for(spec, facts, Supply(pools=(pool,)))
    made = RevisionBuilder(spec, "big", model_source(spec), facts, Settings(worker_image="worker:test")).proposed(plan)
    return replace(made, number=1)


async def test_a_revision_is_read_as_it_was_written_and_its_data_never_changes(
    plane: ControlPlane, owner: dict[str, Any]
) -> None:
    revision = _revision()
    body = controller_revision(owner, revision)
    name = body["metadata"]["name"]
    async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
        applier = Applier(kube, Store())
        await applier.apply(CONTROLLER_REVISION, body)
        stored = await kube.get(CONTROLLER_REVISION, namespace="default", name=name)
        assert stored is not None
        assert revision_of(stored) == replace(revision, plan=bare(revision.plan))
        await applier.renumber(stored, 7)
        stored = await kube.get(CONTROLLER_REVISION, namespace="default", name=name)
        assert stored is not None
        assert revision_of(stored).number == 7
        later = {"op": "add", "path": "/data/later", "value": 1}
        with pytest.raises(KubeError, match="immutable"):
            await kube.json_patch(CONTROLLER_REVISION, namespace="default", name=name, operations=[later])
        settings = engine_config_map(owner, revision)
        for text in ("model: /tmp/mine\n", settings["data"]["engine.yaml"]):
            await kube.delete(CONFIG_MAP, namespace="default", name=name, uid=await _uid(kube, name))
            await kube.apply(CONFIG_MAP, {**settings, "data": {"engine.yaml": text}})
            await Applier(kube, Store()).render(CONFIG_MAP, settings)
            found = await kube.get(CONFIG_MAP, namespace="default", name=name)
            assert found is not None
            assert found["data"] == settings["data"]


async def test_a_worker_that_mounts_an_image_is_accepted_as_it_is_written(
    plane: ControlPlane, owner: dict[str, Any]
) -> None:
    document = {**DOCUMENT, "spec": {"model": {"uri": f"oci://registry:5000/models/big@sha256:{'a1' * 32}"}}}
    revision = _revision(document)
    body = deployment(owner, revision, replicas=1, record=None)
    async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
        for _ in range(2):
            await Applier(kube, Store()).apply(DEPLOYMENT, body)
            stored = await kube.get(DEPLOYMENT, namespace="default", name=body["metadata"]["name"])
            assert stored is not None
            assert stored["metadata"]["generation"] == 1, "the second time there is nothing to write"
        assert stored is not None
        (weights,) = [v for v in stored["spec"]["template"]["spec"]["volumes"] if v["name"] == "weights"]
        assert weights["image"] == {"reference": revision.spec["model"]["uri"][6:], "pullPolicy": "IfNotPresent"}


async def _uid(kube: ClusterKube, name: str) -> str:
    found = await kube.get(CONFIG_MAP, namespace="default", name=name)
    return str(found["metadata"]["uid"]) if found is not None else ""


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("create", "controllerrevisions.apps", False),
        ("patch", "controllerrevisions.apps", False),
        ("delete", "controllerrevisions.apps", False),
        ("get", "controllerrevisions.apps", True),
        ("patch", "modelserves.serving.modelserve.dev/status", False),
        ("create", "configmaps", True),
        ("patch", "deployments.apps", True),
        ("create", "pods", True),
        ("patch", "pods/status", False),
    ],
)
def test_the_role_edit_writes_no_revision(plane: ControlPlane, verb: str, resource: str, allowed: bool) -> None:
    """Its own rules and those of `view`, which a controller that does not run here brings together."""
    for role in ("edit", "view"):
        plane.kubectl.run("apply", "-f", "-", document=BINDING % {"role": role})
    resource, _, subresource = resource.partition("/")
    question = ("auth", "can-i", verb, resource, f"--subresource={subresource}", "-n", "default", "--as=tenant")
    try:
        answer = plane.kubectl.run(*question)
    except KubectlError as error:  # "no" is exit code 1
        answer = str(error)
    assert ("yes" in answer) is allowed, answer
