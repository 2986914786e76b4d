"""ModelAdapters before a real API server: what is admitted, what an edit may not change, and that what the operator
writes fits the schemas, its own and that of InferenceModelRewrite.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from localcluster.binaries import module_folder
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.kubectl import KubectlError, wait_for
from modelserve.api import ModelServe
from modelserve_operator.adapter_reconcile import AdapterReconciler
from modelserve_operator.adapters.decision import decide
from modelserve_operator.adapters.objects import model_rewrite
from modelserve_operator.adapters.snapshot import Adapter, AdapterSnapshot, AdapterWorker, Loaded
from modelserve_operator.adapters.versions import Version
from modelserve_operator.allowed import AllowRule
from modelserve_operator.cluster.kinds import MODEL_REWRITE
from modelserve_operator.cluster.kube import ClusterKube
from modelserve_operator.cluster.store import Store
from modelserve_operator.gathering.adapter_gatherer import AdapterGatherer
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.management_key import ManagementKeys
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.process.work_queue import Key
from modelserve_operator.writing.apply import Applier

pytestmark = pytest.mark.e2e

API = "serving.modelserve.dev/v1alpha1"
REWRITES = "config/crd/bases/inference.networking.x-k8s.io_inferencemodelrewrites.yaml"
SERVE: dict[str, Any] = {
    "apiVersion": API,
    "kind": "ModelServe",
    "metadata": {"name": "gemma", "namespace": "default"},
    "spec": {
        "model": {"uri": "hf://google/gemma-4-31B-it"},
        "adapters": {"max": 4, "rank": 16, "slots": 2, "targets": ["qkv", "o"]},
        "gateway": {"parentRefs": [{"name": "public"}], "endpointPicker": {"name": "picker", "port": 9002}},
    },
}
RULES = (AllowRule(namespaces=("*",)),)


def _adapter(**spec: Any) -> dict[str, Any]:
    base = {"modelRef": {"name": "gemma"}, "uri": "hf://team/legal", **spec}
    return {
        "apiVersion": API,
        "kind": "ModelAdapter",
        "metadata": {"name": "legal", "namespace": "default"},
        "spec": base,
    }


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        text = (module_folder("gateway", "sigs.k8s.io/gateway-api-inference-extension") / REWRITES).read_text()
        found.kubectl.run("apply", "--server-side", "-f", "-", document=text)
        found.kubectl.run("wait", "--for=condition=Established", "crd", "--all", "--timeout=300s")
        wait_for("the API server to list rewrites", lambda: _lists(found, MODEL_REWRITE.plural))
        _apply(found, SERVE)
        yield found


def _lists(plane: ControlPlane, plural: str) -> bool:
    """A definition that is established may still be without its storage."""
    try:
        plane.kubectl.run("get", plural, "--all-namespaces")
    except KubectlError:
        return False
    return True


def _apply(plane: ControlPlane, body: dict[str, Any]) -> str:
    return plane.kubectl.run("apply", "-f", "-", document=json.dumps(body))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"uri": "file:///etc/passwd"}, "spec.uri"),
        ({"uri": "https://example.com/x"}, "spec.uri"),
        ({"uri": "s3://bucket/x", "revision": "v1"}, "revision is of an hf:// address"),
        ({"rollout": {"weight": 101}}, "spec.rollout.weight"),
        ({"servedName": "two words"}, "spec.servedName"),
        ({"modelRef": {"name": "UPPER"}}, "spec.modelRef.name"),
    ],
)
def test_what_no_worker_could_load_is_refused(plane: ControlPlane, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(KubectlError, match=said):
        _apply(plane, _adapter(**spec))


@pytest.mark.parametrize(
    "uri", ["hf://team/legal", "hf://team/loras/sub/legal", "s3://bucket-1/loras/legal", "pvc://claim/loras/legal"]
)
def test_addresses_of_every_kind_are_admitted(plane: ControlPlane, uri: str) -> None:
    assert "dry run" in plane.kubectl.run(
        "apply", "--dry-run=server", "-f", "-", document=json.dumps(_adapter(uri=uri))
    )


def test_slots_are_no_more_than_max(plane: ControlPlane) -> None:
    wrong = {**SERVE, "spec": {**SERVE["spec"], "adapters": {"max": 2, "slots": 3}}}
    with pytest.raises(KubectlError, match=r"adapters\.slots must be at most adapters\.max"):
        _apply(plane, wrong)


def test_an_adapters_life_before_a_real_api_server(plane: ControlPlane) -> None:
    """Held, reported, edited where that is allowed, and gone; twice over nothing is written."""
    _apply(plane, _adapter())
    for field, other in (("modelRef", {"name": "another"}), ("servedName", "other")):
        with pytest.raises(KubectlError, match=f"{field} cannot be changed"):
            _apply(plane, _adapter(**{field: other}))
    asyncio.run(_reconcile(plane))
    shown = plane.kubectl.get("modeladapter", "legal", "-n", "default")
    assert shown["metadata"]["finalizers"] == ["serving.modelserve.dev/drain"]
    conditions = {each["type"]: each for each in shown["status"]["conditions"]}
    assert conditions["Ready"]["reason"] == "NoWorkers"
    assert shown["status"]["nextVersion"]["uri"] == "hf://team/legal"
    written = plane.kubectl.get("configmap", "gemma-adapters", "-n", "default")
    assert '"hf://team/legal"' in written["data"]["adapters.json"]
    columns = plane.kubectl.run("get", "ma", "legal", "-n", "default").splitlines()
    assert columns[0].split() == ["NAME", "MODEL", "SERVED", "RANK", "WORKERS", "READY", "REASON", "AGE"]
    asyncio.run(_reconcile(plane))
    again = plane.kubectl.get("modeladapter", "legal", "-n", "default")
    assert again["metadata"]["resourceVersion"] == shown["metadata"]["resourceVersion"]
    _apply(plane, _adapter(uri="hf://team/legal-2", rollout={"weight": 30}))
    plane.kubectl.run("delete", "modeladapter", "legal", "-n", "default", "--wait=false")
    asyncio.run(_reconcile(plane))
    assert not plane.kubectl.exists("modeladapter", "legal", "-n", "default")


async def _reconcile(plane: ControlPlane) -> None:
    """A new operator process, until it rests."""
    async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
        store = Store()
        gatherer = Gatherer(kube, store, SharedConfig("default"))
        await gatherer.relist()
        keys = ManagementKeys(kube, namespace="default", name="management")
        adapters = AdapterGatherer(kube, store, keys, absent=gatherer.absent)
        reconciler = AdapterReconciler(adapters, Applier(kube, store), RULES)
        for _ in range(4):
            await reconciler.reconcile(Key("default", "gemma"))


def test_the_real_crd_of_rewrites_takes_ours_and_fills_in_nothing(plane: ControlPlane) -> None:
    serve = plane.kubectl.get("modelserve", "gemma", "-n", "default")
    old, new = Version("hf://team/legal"), Version("hf://team/legal-2")
    body = _adapter(uri=new.uri, rollout={"weight": 30})
    body["metadata"] |= {"uid": "u", "finalizers": []}
    body["status"] = {"activeVersion": {"id": old.id, "uri": old.uri}}
    loaded = tuple(Loaded(name="legal", id=each.id, uri=each.uri, state="Ready") for each in (old, new))
    snapshot = AdapterSnapshot(
        key=Key("default", "gemma"),
        adapters=(Adapter.of(body),),
        model_serve=serve,
        spec=ModelServe.parse({**SERVE}).spec,
        workers=(AdapterWorker("w", "u", ready=True, loaded=loaded, names_versions=True),),
    )
    wanted = model_rewrite(serve, decide(snapshot, RULES))
    assert wanted is not None
    versions = [asyncio.run(_written(plane, wanted)) for _ in range(2)]
    assert versions[0] == versions[1]


async def _written(plane: ControlPlane, wanted: dict[str, Any]) -> str:
    async with ClusterKube(through_api_proxy=False, kubeconfig=plane.kubectl.kubeconfig) as kube:
        await Applier(kube, Store()).apply(MODEL_REWRITE, wanted)
    stored = plane.kubectl.get(MODEL_REWRITE.plural, "gemma-adapters", "-n", "default")
    return str(stored["metadata"]["resourceVersion"])
