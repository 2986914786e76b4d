"""At rest the operator writes nothing, whatever happens around it; and it is told at once of what concerns it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from localcluster import audit
from localcluster.deployment import Deployed, example
from localcluster.kubectl import wait_for
from localcluster.settings import ADMIN_USER, OPERATOR_USER, Layout
from localcluster.target import Target

NAMESPACE = "modelserve-e2e"
REST_SECONDS = float(os.environ.get("MODELSERVE_REST_SECONDS", "30"))


def _writes(layout: Layout) -> list[str]:
    """Every write of the operator, events included, from the API server's audit log."""
    return [
        f"{entry['stageTimestamp']} {entry['verb']} {entry['requestURI']}"
        for entry in audit.requests(layout, OPERATOR_USER)
        if entry["verb"] not in audit.READS
    ]


@pytest.fixture
def audited(cluster: Target) -> Layout:
    if cluster.local is None:
        pytest.skip("the audit log of a cluster named by KUBECONFIG cannot be read from here")
    return cluster.local


def _settle(layout: Layout, *, quiet_s: float = 5.0) -> int:
    """Wait until there has been no write for `quiet_s`; the number of writes so far."""
    deadline = time.monotonic() + 120
    last, since = len(_writes(layout)), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, f"the operator does not come to rest: {_writes(layout)[-10:]}"
        time.sleep(0.5)
        if (count := len(_writes(layout))) != last:
            last, since = count, time.monotonic()
    return last


def _disturb(cluster: Target, step: int) -> None:
    """Changes that concern no ModelServe: a node's annotation and label, a foreign pod, a foreign ConfigMap."""
    kubectl = cluster.kubectl.within(NAMESPACE)
    node = kubectl.items("nodes")[0]["metadata"]["name"]
    kubectl.run("annotate", "node", node, f"example.com/seen={step}", "--overwrite")
    kubectl.run("label", "node", node, f"example.com/step={step}", "--overwrite")
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "bystander", "namespace": NAMESPACE},
            "data": {"step": str(step)},
        },
        _bystander_pod(step),
    )
    if step:
        kubectl.run("delete", "pod", f"bystander-{step - 1}", "--wait=false")


def _bystander_pod(step: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"bystander-{step}", "namespace": NAMESPACE, "labels": {"app": "bystander"}},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "sleep",
                    "image": "modelserve-worker:local",
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "600"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


@pytest.fixture
def tidied(cluster: Target) -> Iterator[None]:
    yield
    kubectl = cluster.kubectl.within(NAMESPACE)
    kubectl.run("delete", "pods", "-l", "app=bystander", "--wait=false")
    kubectl.delete("configmap", "bystander")
    node = kubectl.items("nodes")[0]["metadata"]["name"]
    kubectl.run("annotate", "node", node, "example.com/seen-")
    kubectl.run("label", "node", node, "example.com/step-")


def test_no_write_at_rest_and_the_watch_tells_of_a_deleted_service(
    cluster: Target, tiny: Deployed, audited: Layout, tidied: None
) -> None:
    at_rest = _settle(audited)
    assert at_rest > 0, "the audit log knows the operator's writes"
    end, step = time.monotonic() + REST_SECONDS, 0
    while time.monotonic() < end:
        _disturb(cluster, step)
        step += 1
        time.sleep(min(5.0, max(0.0, end - time.monotonic())))
    assert _writes(audited)[at_rest:] == []
    manifest = json.dumps(example("tiny"))  # what Git has
    assert tiny.kubectl.run("diff", "--server-side", "-f", "-", document=manifest) == "", (
        "what Git has is what is there"
    )
    dry = ("apply", "--server-side", "--dry-run=server", "-o", "json", "-f", "-")
    assert json.loads(tiny.kubectl.run(*dry, document=manifest))["spec"] == tiny.resource()["spec"]

    old, since = tiny.kubectl.get("service", "tiny")["metadata"]["uid"], datetime.now(UTC)
    tiny.kubectl.run("delete", "service", "tiny")

    def restored() -> bool:
        found = tiny.kubectl.items("services", "--field-selector=metadata.name=tiny")
        return [service for service in found if service["metadata"]["uid"] != old] != []

    wait_for("the Service restored", restored, interval_s=0.1)
    path = f"/api/v1/namespaces/{NAMESPACE}/services/tiny"
    answers: list[list[str]] = []

    def told() -> bool:
        """The API server writes into the log when it has answered."""
        answers[:] = audit.asked_before_answers(
            audited, path, edited_by=ADMIN_USER, answered_by=OPERATOR_USER, since=since
        )
        return answers != []

    wait_for("the operator's write in the audit log", told)
    assert answers == [[]], "it was heard of by the watch, and not found by a look at everything"
