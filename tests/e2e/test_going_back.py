"""A fine-tune on a Hub whose branch moves: all replicas serve one commit, and A -> B -> A is A to the commit and image.

MODELSERVE_LONG=1 goes back, too, which takes a minute and a half.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localcluster import operator_process
from localcluster.convergence import wait_converged, worker_pods
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.hub import Hub, hub
from localcluster.kubectl import wait_for
from localcluster.target import Target

NAMESPACE = "modelserve-e2e"
FIRST, MOVED = "a1" * 20, "b2" * 20
MODEL = {"uri": "hf://somebody/gemma-4-mine"}


@pytest.fixture
def stand_in(cluster: Target, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with one fine-tune in two commits. `main` moves as soon as a worker has asked what it stands for."""
    if cluster.local is None:
        pytest.skip("the Hub's stand-in is on this machine, and the cluster named by KUBECONFIG may not reach it")
    with hub(cluster.local.host_address) as found:
        for commit in (FIRST, MOVED):
            shutil.copytree(CHECKPOINT, tmp_path / commit)
            found.commits[commit] = tmp_path / commit
        found.branches |= {"main": FIRST, "v2": MOVED}
        found.moves_to = MOVED
        yield found


def _applied(cluster: Target, stand_in: Hub) -> Deployed:
    resources = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    pod = {"resources": resources, "env": [{"name": "HF_ENDPOINT", "value": stand_in.url}]}
    context = {"maxModelLen": 2048}
    return apply_example(cluster, NAMESPACE, "mine", model=MODEL, replicas=2, context=context, pod=pod)


@pytest.fixture
def served(cluster: Target, operator: operator_process.OperatorProcess, stand_in: Hub) -> Iterator[Deployed]:
    """Two replicas of what was `main` when the first of them asked."""
    found = _applied(cluster, stand_in)
    wait_converged(found, 2)
    yield found
    found.kubectl.delete("modelserve", "mine")


def _revision(served: Deployed) -> dict[str, Any]:
    """The ControllerRevision that the status names."""
    return served.kubectl.get("controllerrevision.apps", served.status()["revision"])


def _images(served: Deployed) -> set[str]:
    """Of the containers of its workers."""
    pods = worker_pods(served).values()
    return {each["image"] for pod in pods for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])}


@pytest.fixture
def stopped_later(cluster: Target) -> Iterator[None]:
    yield
    operator_process.stop(cluster.layout)
    operator_process.start(cluster)


def test_all_replicas_serve_what_the_first_was_told(served: Deployed, stand_in: Hub) -> None:
    assert served.status()["modelCommit"] == FIRST
    assert stand_in.branches["main"] == MOVED, "it moved before the second replica was there"
    assert stand_in.commits_sent() == {FIRST}
    assert stand_in.asked.count("main") == 2, "the inspection, and the first worker"


@pytest.mark.skipif("MODELSERVE_LONG" not in os.environ, reason="takes a minute and a half: MODELSERVE_LONG=1 runs it")
def test_going_back_runs_the_commit_and_the_image_of_then_though_the_branch_has_moved(
    served: Deployed, cluster: Target, stand_in: Hub, stopped_later: None
) -> None:
    first, images = _revision(served), _images(served)
    served.patch({"model": {"revision": "v2"}, "replicas": 1})
    wait_converged(served, 1)
    assert served.status()["modelCommit"] == MOVED
    assert served.status()["revision"] != first["metadata"]["name"]
    assert stand_in.commits_sent() == {FIRST, MOVED}
    operator_process.stop(cluster.layout)
    newer = "docker.io/library/modelserve-worker:not-here"
    operator_process.start(cluster, settings={"MODELSERVE_WORKER_IMAGE": newer})
    stand_in.sent.clear()
    served.patch({"model": {"revision": None}})
    wait_for("A wanted", lambda: served.status()["revision"] == first["metadata"]["name"])
    wait_converged(served, 1)
    assert served.status()["modelCommit"] == FIRST
    assert _images(served) == images
    assert _revision(served)["data"] == first["data"]
    assert stand_in.commits_sent(weights=True) == {FIRST}
