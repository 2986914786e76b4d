"""A webhook of the API server that adds a variable to every Deployment is no rival, and costs no worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster.convergence import workers_of
from localcluster.deployment import Deployed, apply_example
from localcluster.kubectl import wait_for
from localcluster.mutating_webhook import VARIABLE, adds_env_to_deployments
from localcluster.operator_process import OperatorProcess
from localcluster.target import Target

NAMESPACE = "modelserve-e2e"


@pytest.fixture
def webhook(cluster: Target, tmp_path: Path) -> Iterator[None]:
    if cluster.local is None:
        pytest.skip("the webhook is on this machine, and the cluster named by KUBECONFIG may not reach it")
    host, folder = cluster.local.host_address, tmp_path / "certificates"
    with adds_env_to_deployments(cluster.kubectl, host=host, folder=folder, namespace=NAMESPACE):
        yield


@pytest.fixture
def younger(tiny: Deployed, cluster: Target, webhook: None) -> Iterator[Deployed]:
    """Made under the webhook; `tiny` is older than it."""
    made = apply_example(cluster, NAMESPACE, "younger")
    yield made
    made.kubectl.delete("modelserve", "younger")


def _said(served: Deployed) -> list[str]:
    chosen = f"--field-selector=involvedObject.name={served.name},reason=ChangedByAdmission"
    return [event["message"] for event in served.kubectl.items("events", chosen)]


def test_what_a_webhook_adds_stays_is_said_once_and_rolls_nobody(
    tiny: Deployed, younger: Deployed, cluster: Target, operator: OperatorProcess
) -> None:
    younger.wait_ready()
    workers, (older,) = workers_of(cluster), tiny.owned("deployments")
    (made,) = younger.owned("deployments")
    assert VARIABLE in made["spec"]["template"]["spec"]["containers"][0]["env"]
    wait_for("it is said", lambda: _said(younger) != [])
    name, wanted = made["metadata"]["name"], made["spec"]["progressDeadlineSeconds"]
    younger.kubectl.run("patch", "deployment", name, "-p", '{"spec":{"progressDeadlineSeconds":77}}')
    wait_for(
        "the operator's next write, which the webhook sees too",
        lambda: younger.kubectl.get("deployment", name)["spec"]["progressDeadlineSeconds"] == wanted,
    )
    for served in (younger, tiny):
        looked = operator.reconciles
        served.kubectl.run("label", "modelserve", served.name, "example.com/looked=again")
        wait_for("another look", lambda looked=looked: operator.reconciles > looked)  # type: ignore[misc]
        served.wait_ready()
        assert served.condition("Ready")["reason"] == "RolledOut"
        assert served.condition("Stalled") == {}
    (said,) = _said(younger)
    assert VARIABLE["name"] in said
    assert _said(tiny) == []
    assert len(younger.owned("replicasets")) == 1
    (still,) = tiny.owned("deployments")
    assert still["metadata"]["generation"] == older["metadata"]["generation"], "what is older is not written for it"
    assert workers_of(cluster) == workers
    tiny.kubectl.run("label", "modelserve", tiny.name, "example.com/looked-")
