"""What others write into Deployments and pods passes for nothing of ours: it is named, and nothing is touched."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONTROLLER_REVISION, DEPLOYMENT, MODEL_SERVE, POD, SERVICE
from modelserve_operator.writing import drift

LATER = "2099-01-01T00:00:00+00:00"
RECORD = {"reason": "InvalidCheckpoint", "message": "no", "attempts": 3, "ready": 0, "trying": False}


def _annotate(world, **annotations: str) -> str:
    """Annotations of our group on the Deployment of `tiny`. Returns its name."""
    name = f"tiny-{world.served_hash()}"

    def forge(body: dict[str, Any]) -> None:
        body["metadata"]["annotations"] |= {f"{labels.GROUP}/{key}": value for key, value in annotations.items()}

    world.cluster.change(DEPLOYMENT, name, forge)
    world.settle()
    return name


def _rest_of(world) -> dict[Any, Any]:
    """All objects but the ModelServe, whose status is written, and Deployments, which were forged."""
    kinds = (MODEL_SERVE, DEPLOYMENT)
    return {key: copy.deepcopy(body) for key, body in world.cluster.objects.items() if key[0] not in kinds}


def _said(world, reason: str) -> list[str]:
    return [event["message"] for event in world.cluster.events if event["reason"] == reason]


def test_annotations_of_a_revision_on_a_deployment_are_refused_by_name(ready_world) -> None:
    before = _rest_of(ready_world)
    forged = {"committed-at": LATER, "approve-plan": "aaaaaaaaaa", "model-commit": "b2" * 20}
    name = _annotate(ready_world, **forged)
    (said,) = _said(ready_world, "AnnotationRefused")
    assert f"Deployment {name}" in said
    assert all(f"{labels.GROUP}/{key}" in said for key in forged)
    assert _rest_of(ready_world) == before
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    ready_world.rest()
    ready_world.restart_operator()
    ready_world.settle()
    assert ready_world.rest() == [], "it is told once, and left as it is"
    assert forged["committed-at"] in str(ready_world.cluster.of(DEPLOYMENT))


@pytest.mark.parametrize("at", [LATER, "2099-01-01T00:00:00"])
def test_a_failure_that_is_yet_to_come_stops_no_growth(ready_world, at: str) -> None:
    name = _annotate(ready_world, **{"terminal-failure": json.dumps({**RECORD, "at": at})})
    (said,) = _said(ready_world, "AnnotationRefused")
    assert name in said
    assert labels.TERMINAL_FAILURE in said
    ready_world.edit(replicas=3)
    assert list(ready_world.deployments().values()) == [3]
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_failure_in_the_past_is_believed_until_its_next_attempt_and_ends_no_worker(ready_world) -> None:
    at = ready_world.now.isoformat()
    _annotate(ready_world, **{"terminal-failure": json.dumps({**RECORD, "attempts": 10**9, "at": at})})
    ready_world.edit(replicas=3)
    assert list(ready_world.deployments().values()) == [1], "ready workers stay"
    ready_world.pass_time(30 * 60 + 1)
    assert list(ready_world.deployments().values()) == [3]


@pytest.fixture
def served(world):
    """Two replicas of one commit."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": {"uri": "hf://google/gemma-4-E2B-it"}, "replicas": 2}, name="big")
    world.make_ready()
    return world


def _tells(world, pod: dict[str, Any], commit: str) -> None:
    """The pod's container `resolve` has told this commit."""
    ended = {"name": "resolve", "state": {"terminated": {"exitCode": 0, "message": json.dumps({"commit": commit})}}}
    world.cluster.set_pod(pod, **{**pod["status"], "initContainerStatuses": [ended]})
    world.settle()


def test_pods_that_serve_different_commits_are_said_by_name_and_none_is_ended(served) -> None:
    (revision,) = served.cluster.of(CONTROLLER_REVISION)
    kept = labels.annotation_of(revision, labels.MODEL_COMMIT)
    pods = served.cluster.of(POD)
    other = "b2" * 20
    _tells(served, pods[1], other)
    (said,) = _said(served, "CommitsDiffer")
    assert pods[1]["metadata"]["name"] in said
    assert pods[0]["metadata"]["name"] not in said
    assert kept is not None
    assert kept[:12] in said
    assert other[:12] in said
    assert {pod["metadata"]["uid"] for pod in served.cluster.of(POD)} == {pod["metadata"]["uid"] for pod in pods}
    (revision,) = served.cluster.of(CONTROLLER_REVISION)
    assert labels.annotation_of(revision, labels.MODEL_COMMIT) == kept, "a pod's word changes no revision"
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    served.cluster.remove(POD, "ml", pods[1]["metadata"]["name"])
    served.make_ready()
    assert "commit" not in served.message("Planned", "big"), "its successor serves what the others do"


def _as_if_admitted(change: Callable[[dict[str, Any]], None], *, found: dict[str, Any]) -> Callable[..., None]:
    """The change with the annotation that would have it pass for admission's: anybody can compute that."""

    def forge(body: dict[str, Any]) -> None:
        change(body)
        body["metadata"].setdefault("annotations", {})[labels.ADMITTED] = labels.short_hash(found)

    return forge


def test_an_edit_of_a_service_does_not_pass_for_admissions_by_its_annotation(ready_world) -> None:
    """It would keep every worker from its clients for good, without a word."""
    (service,) = ready_world.cluster.of(SERVICE)
    found = {"spec.selector (app)": {**service["spec"]["selector"], "app": "nobody"}}
    blackhole = _as_if_admitted(lambda body: body["spec"]["selector"].update(app="nobody"), found=found)
    for restarts in (False, True):
        ready_world.cluster.change(SERVICE, "tiny", blackhole)
        if restarts:  # as while none ran
            ready_world.restart_operator()
        ready_world.settle()
        assert ready_world.cluster.of(SERVICE)[0]["spec"] == service["spec"]
    for _ in range(drift.MOST_HEALS):
        ready_world.cluster.change(SERVICE, "tiny", blackhole)
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    ready_world.pass_time(drift.LONGEST_WAIT.total_seconds())
    assert ready_world.condition("Available") == ("True", "Serving")


def test_an_edit_of_a_deployment_does_not_either_while_the_operator_runs(ready_world) -> None:
    (deployment,) = ready_world.cluster.of(DEPLOYMENT)
    name = deployment["metadata"]["name"]
    env = [*deployment["spec"]["template"]["spec"]["containers"][0]["env"], {"name": "LD_PRELOAD", "value": "/x"}]
    found = {"spec.template.spec.containers.env (LD_PRELOAD)": env}

    def preload(body: dict[str, Any]) -> None:
        body["spec"]["template"]["spec"]["containers"][0]["env"] = env

    ready_world.cluster.change(DEPLOYMENT, name, _as_if_admitted(preload, found=found))
    ready_world.settle()
    assert "LD_PRELOAD" not in str(ready_world.cluster.of(DEPLOYMENT))
