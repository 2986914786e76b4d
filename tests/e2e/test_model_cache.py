"""A ModelCache that eight ModelServes read: its token is missing, its download is killed in the middle, a file of it is
damaged, and in the end its bytes go. One story, in this order; bytes are counted at the stand-in for the Hub.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localcluster import operator_process
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.hub import Hub, hub
from localcluster.kubectl import Kubectl, KubectlError, condition, wait_for
from localcluster.settings import NODE_NAME
from localcluster.target import Target

NAMESPACE = "modelserve-e2e"
COMMIT = "c5" * 20
URI, CACHE, TOKEN = "hf://somebody/gemma-4-shared", "shared", "hf_of_the_tests"
NAMES = [f"reader-{number}" for number in range(8)]
WEIGHTS = "model.safetensors"


@dataclass
class Cached:
    kubectl: Kubectl
    hub: Hub
    folder: Path  # of the cache on the node's disk

    def reason(self) -> str:
        return _ready(self, CACHE)

    def shown(self) -> dict[str, Any]:
        return self.kubectl.get("modelcache", CACHE)

    def weights_sent(self) -> int:
        return sum(each.bytes for each in self.hub.sent if each.name == WEIGHTS)


def _cache(url: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": CACHE},
        "spec": {
            "uri": URI,
            "storage": {"persistentVolumeClaim": {"name": "weights"}},
            "pod": {"env": [{"name": "HF_ENDPOINT", "value": url}]},
            **spec,
        },
    }


@pytest.fixture(scope="module")
def cached(cluster: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    """The cache, whose Hub wants a token that it is not given."""
    if cluster.local is None:
        pytest.skip("the Hub's stand-in is on this machine, and the cluster named by KUBECONFIG may not reach it")
    operator_process.start(cluster)
    with hub(cluster.local.host_address) as served:
        served.commits[COMMIT] = tmp_path_factory.mktemp("hub") / COMMIT
        shutil.copytree(CHECKPOINT, served.commits[COMMIT])
        served.branches["main"], served.token = COMMIT, TOKEN
        kubectl = cluster.kubectl.within(NAMESPACE)
        kubectl.apply(_cache(served.url))
        yield Cached(kubectl, served, cluster.local.weights / NAMESPACE / "modelserve-caches" / CACHE)
        for name in NAMES:
            kubectl.run("delete", "modelserve", name, "--ignore-not-found", "--wait=false")
        kubectl.run("delete", "modelcache", CACHE, "--ignore-not-found")


@pytest.fixture
def made_volume(cluster: Target) -> Iterator[str]:
    """A volume that waits for a claim of its class, as a provisioner would make one; the class."""
    assert cluster.local is not None
    folder, name = cluster.local.weights / "made-for-a-cache", "made-for-a-cache"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    on_the_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": name,
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_the_node]}]}},
    }
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    yield name
    cluster.kubectl.delete("persistentvolume", name)


def _ready(cached: Cached, name: str) -> str:
    return str(condition(cached.kubectl.get("modelcache", name), "Ready").get("reason", ""))


def _readers(cluster: Target) -> list[Deployed]:
    """Eight, of which one has a worker: the machine has two cores."""
    resources = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    model = {"uri": URI, "cache": {"name": CACHE}}
    return [
        apply_example(
            cluster, NAMESPACE, name, model=model, replicas=int(name == NAMES[0]), context={"maxModelLen": 1024},
            pod={"resources": resources},
        )
        for name in NAMES
    ]  # fmt: skip


def _reason_is(reader: Deployed, reason: str) -> bool:
    return bool(reader.condition("Planned").get("reason") == reason)


def test_a_missing_token_is_said_and_a_download_that_is_killed_goes_on(cluster: Target, cached: Cached) -> None:
    size = (CHECKPOINT / WEIGHTS).stat().st_size
    wait_for("it is refused", lambda: cached.reason() == "AccessDenied")
    assert condition(cached.shown(), "Stalled")["status"] == "True"
    readers = _readers(cluster)
    half, go_on = threading.Event(), threading.Event()

    def stop_at_half(name: str, sent: int) -> None:
        if name == WEIGHTS and sent >= size // 2:
            cached.hub.between = None
            half.set()
            go_on.wait(120)

    cached.hub.between = stop_at_half
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": TOKEN}}
    cached.kubectl.apply(secret, _cache(cached.hub.url, secretRef={"name": "hub"}))
    assert half.wait(120)
    wait_for("progress is told", lambda: (cached.shown()["status"].get("fetch") or {}).get("bytesPerSecond", 0) > 0)
    fetch = cached.shown()["status"]["fetch"]
    assert 0 < fetch["bytes"] < fetch["totalBytes"]
    for reader in readers:
        wait_for("it waits", partial(_reason_is, reader, "WaitingForCache"))
    (pod,) = cached.kubectl.items("pods", "-l", f"serving.modelserve.dev/cache={CACHE}")
    cached.kubectl.run("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    go_on.set()
    operator_process.start(cluster).process.kill()
    operator_process.start(cluster)
    wait_for("it is filled", lambda: cached.reason() == "Filled")
    filled = cached.shown()["status"]["filled"]
    assert (filled["commit"], filled["held"]) == (COMMIT, [COMMIT])
    assert (cached.folder / COMMIT / WEIGHTS).read_bytes() == (CHECKPOINT / WEIGHTS).read_bytes()
    assert cached.weights_sent() < 2 * size, "what was there was not sent again"
    assert filled["fetchedBytes"] < filled["bytes"], "the second pod went on from what the first left"


def _workers(cached: Cached) -> list[dict[str, Any]]:
    wanted = f"serving.modelserve.dev/name={NAMES[0]},app.kubernetes.io/component=worker"
    return cached.kubectl.items("pods", "-l", wanted)


@pytest.mark.parametrize(("spec", "said"), [
    ({"uri": "pvc://claim/model"}, "spec.uri"),
    ({"uri": "hf://somebody/other"}, "uri cannot be changed"),
    ({"storage": {"persistentVolumeClaim": {"name": "weights"}, "volume": {"size": "1Gi"}}}, "storage is one of"),
    ({"storage": {"volume": {"size": "1Gi"}}}, "storage cannot be changed"),
    ({"refreshMinutes": 1}, "spec.refreshMinutes"),
])  # fmt: skip
def test_what_no_edit_may_make_of_it_is_refused(cached: Cached, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(KubectlError, match=said):
        cached.kubectl.apply(_cache(cached.hub.url, **spec))


def test_eight_readers_of_one_model_fetch_nothing_more(cluster: Target, cached: Cached) -> None:
    sent = cached.hub.bytes_sent
    readers = [Deployed(cluster, cached.kubectl, name) for name in NAMES]
    for reader in readers:
        reader.wait_ready()
    assert cached.hub.bytes_sent == sent
    wait_for("all are counted", lambda: cached.shown()["status"]["users"] == len(NAMES))
    (pod,) = cached.kubectl.items(
        "pods", "-l", "serving.modelserve.dev/name=reader-0,app.kubernetes.io/component=worker"
    )
    assert "initContainers" not in pod["spec"]


def test_a_damaged_file_is_found_when_asked_for_and_the_worker_goes_on(cached: Cached) -> None:
    path, sent = cached.folder / COMMIT / WEIGHTS, cached.weights_sent()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.with_name("damaged").write_bytes(content)
    shutil.copystat(path, path.with_name("damaged"))
    path.with_name("damaged").replace(path)
    before = _workers(cached)
    cached.kubectl.run("annotate", "modelcache", CACHE, "--overwrite", "serving.modelserve.dev/retry=verify")
    wait_for("it is repaired", lambda: cached.shown()["status"]["filled"].get("repaired") == 1)
    assert path.read_bytes() == (CHECKPOINT / WEIGHTS).read_bytes()
    assert cached.weights_sent() - sent == len(content)
    after = _workers(cached)
    assert [each["metadata"]["uid"] for each in after] == [each["metadata"]["uid"] for each in before]
    assert condition(cached.kubectl.get("modelserve", NAMES[0]), "Ready")["status"] == "True"


def test_a_claim_is_made_for_a_cache_and_goes_with_it(cluster: Target, cached: Cached, made_volume: str) -> None:
    volume = {"size": "1Gi", "storageClassName": made_volume, "accessModes": ["ReadWriteMany"]}
    own = _cache(cached.hub.url, secretRef={"name": "hub"}, storage={"volume": volume})
    own["metadata"]["name"] = "own"
    cached.kubectl.apply(own)
    wait_for("it is filled", lambda: _ready(cached, "own") == "Filled")
    claim = cached.kubectl.get("persistentvolumeclaim", "own-cache")
    assert claim["metadata"]["ownerReferences"][0]["kind"] == "ModelCache"
    cached.kubectl.run("delete", "modelcache", "own")
    wait_for("its claim goes", lambda: not cached.kubectl.exists("persistentvolumeclaim", "own-cache"))


def test_its_bytes_go_once_nobody_reads_it(cached: Cached) -> None:
    cached.kubectl.run("delete", "modelcache", CACHE, "--wait=false")
    wait_for("it waits for its readers", lambda: cached.reason() == "InUse")
    assert (cached.folder / COMMIT / WEIGHTS).exists()
    cached.kubectl.run("delete", "modelserves", *NAMES)
    wait_for("it is gone", lambda: not cached.kubectl.exists("modelcache", CACHE))
    assert not cached.folder.exists()
    assert (cached.folder.parents[1] / CHECKPOINT.name).exists(), "what else is on the claim stays"
