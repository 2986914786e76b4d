"""From release 0.1.0 to this one, with real pods: its operator makes everything, and this one takes over."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from localcluster import operator_process, weights_volume
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.convergence import worker_pods, workers_of
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import wait_for
from localcluster.settings import REPOSITORY
from localcluster.target import Target
from localcluster.traffic import traffic_to

# Its own: an operator of 0.1.0 plans anew what this release has made, since there is no way back to it.
NAMESPACE = "modelserve-aged"
EARLIER = REPOSITORY / "tests" / "releases" / "0.1.0" / "operator.whl"


@pytest.fixture
def aged(cluster: Target) -> Iterator[Deployed]:
    """Made and Ready by release 0.1.0, whose operator still runs."""
    weights_volume.create_namespace(cluster, NAMESPACE)
    upload_checkpoint(cluster, NAMESPACE, CHECKPOINT)
    operator_process.stop(cluster.layout)
    operator_process.start(cluster, packages=EARLIER, settings={"MODELSERVE_WATCH_NAMESPACES": NAMESPACE})
    served = apply_example(cluster, NAMESPACE, "aged")
    try:
        served.wait_ready()
        yield served
    finally:
        operator_process.stop(cluster.layout)
        weights_volume.delete_namespace(cluster, NAMESPACE)


def test_an_upgrade_from_0_1_0_ends_no_pod_and_fails_no_request(aged: Deployed, cluster: Target) -> None:
    (deployment,) = aged.owned("deployments")
    name = deployment["metadata"]["name"]
    assert "template.json" in aged.kubectl.get("configmap", name)["data"], "it was made by 0.1.0"
    before = workers_of(cluster)
    assert len(worker_pods(aged)) == 1
    with traffic_to(aged, newcomers=1) as traffic:
        traffic.wait_for_answers()
        operator_process.stop(cluster.layout)
        started = operator_process.start(cluster)
        wait_for("the revision", lambda: bool(aged.owned("controllerrevisions.apps")))
        # Ready it was before: that says nothing of this operator.
        wait_for("another look", lambda: (NAMESPACE, "aged") in started.reconciled)
        aged.wait_ready()
        traffic.wait_for_answers()
    assert traffic.errors == []
    assert workers_of(cluster) == before, "of the bystanders too"
    (revision,) = aged.owned("controllerrevisions.apps")
    assert (revision["metadata"]["name"], revision["data"]["importedFrom"]) == (name, "0.1.0")
    assert revision["data"]["template"] == json.loads(aged.kubectl.get("configmap", name)["data"]["template.json"])
    assert aged.status()["revision"] == name
    assert aged.condition("Ready")["status"] == "True"
