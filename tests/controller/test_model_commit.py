"""A branch of the Hub is resolved once: every later pod serves that commit, though the branch moves."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, POD

FIRST, MOVED = "a1" * 20, "b2" * 20
MODEL = {"uri": "hf://google/gemma-4-E2B-it"}


def _commits(world) -> list[str]:
    """What the pods that are there were told to serve."""
    found = []
    for pod in world.cluster.of(POD):
        for status in pod["status"].get("initContainerStatuses", ()):
            found.append(json.loads(status["state"]["terminated"]["message"])["commit"])
    return found


def _recorded(world) -> dict[str, str | None]:
    bodies = world.cluster.of(CONTROLLER_REVISION)
    return {body["metadata"]["name"]: labels.annotation_of(body, labels.MODEL_COMMIT) for body in bodies}


def _moves_after_the_first(world) -> None:
    """The branch moves as soon as one pod has asked."""
    resolved = world.cluster._resolved

    def move(namespace: str, pod: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = resolved(namespace, pod)
        world.cluster.hub = MOVED
        return told

    world.cluster._resolved = move


@pytest.fixture
def served(world):
    """Three replicas of a branch that moved between the first and the second of them."""
    world.cluster.hub = FIRST
    _moves_after_the_first(world)
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": MODEL, "replicas": 3}, name="big")
    world.make_ready()
    return world


def test_all_replicas_serve_what_the_first_was_told(served) -> None:
    assert _commits(served) == [FIRST] * 3
    assert served.cluster.hub_asked == 1
    assert list(_recorded(served).values()) == [FIRST]
    assert served.status("big")["modelCommit"] == FIRST
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    served.edit("big", replicas=5)
    assert _commits(served) == [FIRST] * 5, "next month too"
    served.rest()
    served.restart_operator()
    served.settle()
    assert served.rest() == []
    assert _commits(served) == [FIRST] * 5


def test_another_plan_and_another_label_keep_the_commit(served) -> None:
    (before,) = _recorded(served)
    served.edit("big", context={"maxModelLen": 4096})
    for _ in range(4):
        served.make_ready()
    served.edit("big", pod={"labels": {"team": "a"}})
    for _ in range(4):
        served.make_ready()
    assert served.condition("Ready", "big") == ("True", "RolledOut")
    assert served.status("big")["revision"] != before
    assert set(_recorded(served).values()) == {FIRST}
    assert (_commits(served), served.cluster.hub_asked) == ([FIRST] * 3, 1)


def test_going_back_serves_the_commit_of_then(served) -> None:
    (first,) = _recorded(served)
    served.edit("big", model={**MODEL, "revision": "v2"})
    for _ in range(4):
        served.make_ready()
    assert _commits(served) == [MOVED] * 3
    assert served.status("big")["modelCommit"] == MOVED
    served.edit("big", model=MODEL)
    for _ in range(4):
        served.make_ready()
    assert served.status("big")["revision"] == first
    assert (served.status("big")["modelCommit"], _commits(served)) == (FIRST, [FIRST] * 3)
    assert served.cluster.hub_asked == 2


def test_a_commit_that_is_named_is_not_asked_for(world) -> None:
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": {**MODEL, "revision": FIRST}, "replicas": 3}, name="big")
    assert list(world.deployments().values()) == [3], "all at once"
    (body,) = world.cluster.of(CONTROLLER_REVISION)
    assert [each["name"] for each in body["data"]["template"]["spec"]["initContainers"]] == ["fetch"]


def test_until_one_has_told_there_is_one(world) -> None:
    world.cluster.hub = None
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": MODEL, "replicas": 3}, name="big")
    assert list(world.deployments().values()) == [1]
    assert world.condition("Ready", "big")[0] == "False"
    assert "modelCommit" not in world.status("big")
    (pod,) = world.cluster.of(POD)
    for message in ("", "{}", '{"commit": "main"}', "[]"):
        ended = {"terminated": {"exitCode": 0, "message": message}}
        world.cluster.set_pod(pod, phase="Pending", initContainerStatuses=[{"name": "resolve", "state": ended}])
        world.settle()
        assert list(world.deployments().values()) == [1], "what is no commit is none"
    ended = {"terminated": {"exitCode": 0, "message": json.dumps({"commit": FIRST})}}
    world.cluster.set_pod(pod, phase="Pending", initContainerStatuses=[{"name": "resolve", "state": ended}])
    world.settle()
    assert list(world.deployments().values()) == [3]
    assert list(_recorded(world).values()) == [FIRST]


def test_the_recorded_commit_is_rendered_from_the_revision(served) -> None:
    (name,) = (
        each["metadata"]["name"] for each in served.cluster.of(CONFIG_MAP) if "-commit-" in each["metadata"]["name"]
    )
    real = copy.deepcopy(served.cluster.objects[CONFIG_MAP, "ml", name])
    served.cluster.remove(CONFIG_MAP, "ml", name)
    served.cluster.put(CONFIG_MAP, {**real, "data": {"commit": MOVED}})
    served.settle()
    assert served.cluster.objects[CONFIG_MAP, "ml", name]["data"] == {"commit": FIRST}
    served.edit("big", replicas=5)
    assert _commits(served) == [FIRST] * 5


def test_a_commit_that_is_gone_is_a_condition_and_ready_workers_stay(served) -> None:
    served.edit("big", replicas=4)
    (pod,) = [each for each in served.cluster.of(POD) if each["status"]["phase"] == "Pending"]
    gone = TerminationMessage(
        reason=TerminationReason.ModelCommitGone, message=f"no longer has commit {FIRST}"
    ).encode()
    state = {"name": "fetch", "state": {"terminated": {"exitCode": TERMINAL_EXIT_CODE, "message": gone}}}
    served.cluster.set_pod(pod, phase="Pending", initContainerStatuses=[state])
    served.settle()
    assert served.condition("Stalled", "big") == ("True", "ModelCommitGone")
    assert FIRST in served.message("Stalled", "big")
    assert served.condition("Available", "big") == ("True", "Serving")
    assert served.status("big")["readyReplicas"] == 3


def test_files_of_a_claim_that_were_exchanged_are_said_and_nothing_is_restarted(world, tiny_spec, tiny_facts) -> None:
    first, second = (tiny_facts.model_copy(update={"identity": digit * 64}) for digit in "12")
    world.create(tiny_spec)
    world.cluster.end_job(message=first.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    (body,) = world.cluster.of(CONTROLLER_REVISION)
    assert body["data"]["modelIdentity"] == "1" * 64
    pods = world.cluster.of(POD)
    for facts, events in ((first, 0), (second, 1)):
        (name,) = (
            each["metadata"]["name"] for each in world.cluster.of(CONFIG_MAP) if "-model-" in each["metadata"]["name"]
        )
        world.cluster.remove(CONFIG_MAP, "ml", name)
        world.settle()
        world.cluster.end_job(message=facts.model_dump_json(by_alias=True))
        world.settle()
        assert [event["reason"] for event in world.cluster.events].count("ModelChanged") == events
    assert world.cluster.of(POD) == pods
    assert world.condition("Ready") == ("True", "RolledOut")
    assert "not those that plan" in world.message("Planned")
