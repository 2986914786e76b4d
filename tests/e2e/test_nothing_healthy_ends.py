"""Faults of one part leave the others alone: what each does to ready workers and to requests under way."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from localcluster import audit, weights_volume
from localcluster.deployment import CHECKPOINT, Deployed, example
from localcluster.kubectl import Kubectl, wait_for
from localcluster.service_rules import wait_routed
from localcluster.settings import ADMIN_USER, OPERATOR_USER
from localcluster.target import Target
from localcluster.traffic import traffic_to
from localcluster.weights_volume import MOUNT

NAMESPACE = "modelserve-e2e"


def _ready_pods(served: Deployed) -> set[str]:
    """uids of worker pods that are Ready and not on their way out."""
    return {
        pod["metadata"]["uid"]
        for pod in served.owned("pods")
        if "deletionTimestamp" not in pod["metadata"]
        and any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
    }


def _endpoints(kubectl: Kubectl, service: str) -> int:
    """Ready endpoints behind a Service."""
    slices = kubectl.items("endpointslices", "-l", f"kubernetes.io/service-name={service}")
    endpoints: list[dict[str, Any]] = [each for body in slices for each in body.get("endpoints") or ()]
    return sum(bool(each["conditions"].get("ready")) for each in endpoints)


def test_a_failing_worker_leaves_the_ready_one(cluster: Target, tiny: Deployed) -> None:
    weights = f"{MOUNT}/{CHECKPOINT.name}/model.safetensors"
    healthy = _ready_pods(tiny)
    assert len(healthy) == 1
    with traffic_to(tiny) as traffic:
        wait_for("first answers", lambda: traffic.answered > 3 or bool(traffic.errors))
        weights_volume.run_job(cluster, NAMESPACE, name="hide", command=["mv", weights, f"{weights}.hidden"])
        try:
            tiny.kubectl.run("scale", "modelserve/tiny", "--replicas=2")
            wait_for("Stalled", lambda: tiny.condition("Stalled").get("status") == "True")
            assert tiny.condition("Stalled")["reason"] == "InvalidCheckpoint"
            assert "safetensors" in tiny.condition("Stalled")["message"]
            wait_for("the failed pod gone", lambda: len(tiny.owned("pods")) == 1)
            assert _ready_pods(tiny) == healthy
            assert [each["spec"]["replicas"] for each in tiny.owned("deployments")] == [1]
            assert tiny.condition("Available")["status"] == "True"
            assert _endpoints(tiny.kubectl, "tiny") == 1
        finally:
            weights_volume.run_job(cluster, NAMESPACE, name="show", command=["mv", f"{weights}.hidden", weights])
            tiny.kubectl.run("scale", "modelserve/tiny", "--replicas=1")
        tiny.wait_ready()
        assert _ready_pods(tiny) == healthy
        answered = traffic.answered
        wait_for("answers after it all", lambda: traffic.answered > answered + 3)
    assert traffic.errors == []


def _service(served: Deployed) -> dict[str, Any]:
    spec: dict[str, Any] = served.kubectl.get("service", served.name)["spec"]
    return spec


def _worker_env(served: Deployed) -> set[str]:
    (deployment,) = served.owned("deployments")
    (worker,) = deployment["spec"]["template"]["spec"]["containers"]
    return {variable["name"] for variable in worker["env"]}


def _edit_service(served: Deployed, spec: str) -> None:
    served.kubectl.run("patch", "service", served.name, "-p", f'{{"spec": {spec}}}')


def _put_right_at_once(served: Deployed, *children: str, since: datetime) -> None:
    """As soon as the operator's watch tells of it; a look at everything would come minutes later."""
    layout = served.target.local
    if layout is None:  # its audit log cannot be read from here
        return
    for child in children:
        path = f"{'/apis/apps/v1' if child.startswith('deployments/') else '/api/v1'}/namespaces/{NAMESPACE}/{child}"
        answers = audit.asked_before_answers(layout, path, edited_by=ADMIN_USER, answered_by=OPERATOR_USER, since=since)
        assert answers, f"nobody has edited {child}"
        assert not any(answers), (child, answers)


def test_edits_of_children_are_put_right_end_no_ready_pod_and_are_said_when_they_come_back(tiny: Deployed) -> None:
    healthy, selector, began = _ready_pods(tiny), _service(tiny)["selector"], datetime.now(UTC)
    (deployment,) = tiny.owned("deployments")
    with traffic_to(tiny) as traffic:
        wait_for("first answers", lambda: traffic.answered > 3 or bool(traffic.errors))
        _edit_service(tiny, '{"selector": {"app": "x"}}')
        wait_for("the selector put right", lambda: _service(tiny)["selector"] == selector)
        wait_for("one endpoint", lambda: _endpoints(tiny.kubectl, "tiny") == 1)
        wait_routed(tiny)
        reached_again = time.monotonic()
        _edit_service(tiny, '{"ports": [{"name": "debug", "port": 81}]}')
        wait_for("the ports put right", lambda: len(_service(tiny)["ports"]) == 1)
        tiny.kubectl.run("set", "env", f"deployment/{deployment['metadata']['name']}", "DEBUG=1")
        wait_for("the environment put right", lambda: "DEBUG" not in _worker_env(tiny))
        wait_for("one endpoint", lambda: _endpoints(tiny.kubectl, "tiny") == 1)
        tiny.wait_ready()
        answered = traffic.answered
        wait_for("answers after it all", lambda: traffic.answered > answered + 3)
        assert healthy <= _ready_pods(tiny)
    # While the edited selector stands there is nobody to reach; but whatever was accepted was answered.
    assert traffic.errors_of_accepted == []
    assert traffic.errors_since(reached_again) == []
    _put_right_at_once(tiny, f"services/{tiny.name}", f"deployments/{deployment['metadata']['name']}", since=began)

    def given_up() -> bool:
        """The rival writes once more wherever it was put right."""
        if _service(tiny)["selector"] == selector:
            _edit_service(tiny, '{"selector": {"app": "x"}}')
        return tiny.condition("Stalled").get("reason") == "DriftContested"

    wait_for("DriftContested", given_up)
    assert "spec.selector (app)" in tiny.condition("Stalled")["message"]
    wait_for("not Available", lambda: given_up() and tiny.condition("Available")["status"] == "False")
    assert tiny.condition("Ready")["status"] == "False"
    _edit_service(tiny, '{"selector": {"app": null}}')
    tiny.kubectl.run("annotate", "modelserve", "tiny", "serving.modelserve.dev/retry=1")  # else it waits for quiet
    tiny.wait_ready()
    assert healthy <= _ready_pods(tiny)


def test_children_left_by_a_deleted_namesake_are_adopted_and_serve_on(tiny: Deployed) -> None:
    healthy, document = _ready_pods(tiny), example("tiny")
    with traffic_to(tiny) as traffic:
        wait_for("first answers", lambda: traffic.answered > 3 or bool(traffic.errors))
        tiny.kubectl.run("delete", "modelserve", "tiny", "--cascade=orphan")
        wait_for("orphans", lambda: "ownerReferences" not in tiny.kubectl.get("service", "tiny")["metadata"])
        tiny.kubectl.apply(document)
        tiny.wait_ready()
        owner = tiny.resource()["metadata"]["uid"]
        for kind in ("services", "deployments", "configmaps", "poddisruptionbudgets"):
            for body in tiny.owned(kind):
                assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == [owner]
        assert _ready_pods(tiny) == healthy
    assert traffic.errors == []
