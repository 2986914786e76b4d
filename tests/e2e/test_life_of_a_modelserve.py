"""The example on the real cluster: columns, scale, eviction, a rollout under load, restarts, deletion."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from localcluster import operator_process
from localcluster.deployment import CHECKPOINT, NAME_LABEL, Deployed, apply_example
from localcluster.kubectl import KubectlError, wait_for
from localcluster.operator_process import OperatorProcess
from localcluster.service_access import service_url
from localcluster.service_rules import wait_routed
from localcluster.target import Target
from localcluster.traffic import models_at, traffic_to

NAMESPACE = "modelserve-e2e"
API = f"/apis/serving.modelserve.dev/v1alpha1/namespaces/{NAMESPACE}/modelserves"


def _pods(served: Deployed) -> dict[str, int]:
    """Worker pods that are not on their way out: uid and container restarts."""
    return {
        pod["metadata"]["uid"]: sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ()))
        for pod in served.owned("pods")
        if "deletionTimestamp" not in pod["metadata"] and "job-name" not in pod["metadata"]["labels"]
    }


def test_wait_and_columns_tell_the_state(tiny: Deployed) -> None:
    tiny.kubectl.run("wait", "--for=condition=Ready", "modelserve/tiny", "--timeout=60s")
    header, row = (line.split() for line in tiny.kubectl.run("get", "ms", "tiny").splitlines())
    shown = dict(zip(header, row, strict=True))
    assert shown["MODEL"] == f"pvc://weights/{CHECKPOINT.name}"
    assert (shown["GPU"], shown["TP"], shown["MAXLEN"], shown["READY"]) == ("CPU", "1", "16640", "True")
    wide = tiny.kubectl.run("get", "ms", "tiny", "-o", "wide")
    status = tiny.status()
    assert status["plan"]["hash"] in wide
    assert status["url"] == f"http://tiny.{NAMESPACE}.svc/v1"
    assert status["url"] in wide
    assert "maxModelLen" in tiny.kubectl.run("explain", "modelserve.spec.context")


def test_what_tests_read_is_what_kubectl_prints(tiny: Deployed) -> None:
    for words in (("service", "tiny"), ("deployments,services,configmaps", "-l", f"{NAME_LABEL}=tiny")):
        printed = json.loads(tiny.kubectl.run("get", *words, "-o", "json"))
        found = tiny.kubectl.get(*words)
        assert found.get("items", found) == printed.get("items", printed)


def test_the_worker_has_the_memory_that_was_planned_and_the_cpu_measures_nothing(tiny: Deployed) -> None:
    with (
        service_url(tiny.target, NAMESPACE, "tiny") as url,
        urllib.request.urlopen(f"{url}/v1/plan", timeout=10) as got,
    ):
        reported = json.load(got)
    assert reported["allocated"]["kvPoolBytes"] == tiny.status()["plan"]["perGpu"]["kvPoolBytes"] > 0
    assert "calibration" not in tiny.status()


def test_scale_subresource_works_without_replicas_in_the_manifest(tiny: Deployed) -> None:
    scale = json.loads(tiny.kubectl.run("get", "--raw", f"{API}/tiny/scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
    selected = tiny.kubectl.items("pods", "-l", scale["status"]["selector"])
    assert {pod["metadata"]["uid"] for pod in selected} == set(_pods(tiny))
    first = set(_pods(tiny))
    revision = tiny.status()["plan"]["hash"]
    try:
        tiny.kubectl.run("scale", "modelserve/tiny", "--replicas=2")
        wait_for("two ready workers", lambda: tiny.status().get("readyReplicas") == 2)
        assert first < set(_pods(tiny)), "the first worker keeps running"
        assert tiny.status()["plan"]["hash"] == revision
        wait_for("both are in the disruption budget", lambda: _budget(tiny) == (2, 1))
        _evictions_leave_one_worker(tiny)
    finally:
        tiny.kubectl.run("scale", "modelserve/tiny", "--replicas=1")
    wait_for("one worker", lambda: len(_pods(tiny)) == 1 and tiny.status()["replicas"] == 1)
    tiny.wait_ready()


def _budget(served: Deployed) -> tuple[int, int]:
    """Healthy pods, and how many of them may be evicted; a controller of the cluster counts both."""
    status = served.kubectl.get("poddisruptionbudget", served.name)["status"]
    return status["currentHealthy"], status["disruptionsAllowed"]


def _evictions_leave_one_worker(served: Deployed) -> None:
    """The disruption budget lets a drain take one of two workers, not both."""
    names = [pod["metadata"]["name"] for pod in served.owned("pods") if "deletionTimestamp" not in pod["metadata"]]
    answers = []
    for name in names:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        try:
            answers.append(served.kubectl.run("create", "--raw", path, "-f", "-", document=json.dumps(eviction)))
        except KubectlError as error:
            answers.append(str(error))
    refused = [answer for answer in answers if "disruption budget" in answer]
    assert (len(answers), len(refused)) == (2, 1), answers


def test_a_new_max_model_len_takes_over_without_an_error(cluster: Target, operator: OperatorProcess) -> None:
    served = apply_example(cluster, NAMESPACE, "rolling")

    def asked() -> list[int]:
        """Replicas of its Deployments."""
        return sorted(each["spec"]["replicas"] for each in served.owned("deployments"))

    served.wait_ready()
    before = served.status()["plan"]["hash"]
    with traffic_to(served) as traffic:
        wait_for("first answers", lambda: traffic.answered > 3 or bool(traffic.errors))
        served.patch({"context": {"maxModelLen": 1024}})
        served.wait_ready()
        after = served.status()["plan"]["hash"]
        assert after != before
        wait_for("the old revision is stopped", lambda: asked() in ([0, 1], [1]))
        wait_routed(served)
        answered = traffic.answered
        wait_for("answers by the new revision", lambda: traffic.answered > answered + 3)
        assert [model["max_model_len"] for model in models_at(traffic.url)] == [1024]
        wait_for("the old revision is gone with its pods", lambda: asked() == [1])
    assert traffic.errors == [], "connections that were kept until the old worker's SIGTERM included"
    assert len([pod for pod in served.owned("pods") if "job-name" not in pod["metadata"]["labels"]]) == 1
    assert served.status()["maxModelLen"] == 1024
    served.kubectl.delete("modelserve", "rolling")


@pytest.fixture
def relabelled_node(cluster: Target) -> Iterator[str]:
    node = cluster.kubectl.items("nodes")[0]["metadata"]["name"]
    cluster.kubectl.run("label", "node", node, "example.com/rack=7", "topology.kubernetes.io/zone=z1", "--overwrite")
    yield node
    cluster.kubectl.run("label", "node", node, "example.com/rack-", "topology.kubernetes.io/zone-")


def _wipe_status(served: Deployed) -> None:
    removal = '[{"op": "remove", "path": "/status"}]'
    served.kubectl.run("patch", "ms", served.name, "--subresource=status", "--type=json", "-p", removal)


def test_nothing_but_a_changed_spec_restarts_a_pod(
    cluster: Target, tiny: Deployed, relabelled_node: str, operator: OperatorProcess
) -> None:
    before = _pods(tiny)
    revision = tiny.status()["plan"]["hash"]
    assert len(before) == 1
    operator.stop()
    _wipe_status(tiny)
    assert "plan" not in tiny.status()
    operator_process.start(cluster)
    tiny.wait_ready()
    cluster.kubectl.run("label", "node", relabelled_node, "example.com/rack=8", "--overwrite")
    _wipe_status(tiny)
    wait_for("status is back", lambda: "plan" in tiny.status())
    tiny.wait_ready()
    assert _pods(tiny) == before
    assert tiny.status()["plan"]["hash"] == revision


def test_deletion_needs_no_operator(cluster: Target, operator: OperatorProcess) -> None:
    """Owner references only: the garbage collector does it all, and no finalizer holds anything back."""
    served = apply_example(cluster, NAMESPACE, "mayfly")
    served.wait_ready()
    kinds = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,jobs"
    assert len(served.owned(kinds)) >= 6
    operator.stop()
    assert served.resource()["metadata"].get("finalizers", []) == []
    served.kubectl.run("delete", "modelserve", "mayfly", "--wait=false")
    selector = f"{NAME_LABEL}=mayfly"
    wait_for("all children collected", lambda: served.kubectl.items(kinds, "-l", selector) == [])
    assert not served.kubectl.exists("modelserve", "mayfly")
