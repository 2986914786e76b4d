"""What admission makes of our own writes stays: it is no rival, costs no roll, and is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import DEPLOYMENT, JOB, POD, ResourceKind
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.writing import drift

Body = dict[str, Any]


def _adds_env(kind: ResourceKind, body: Body) -> None:
    """As OTel, Datadog and Kyverno do."""
    if kind is DEPLOYMENT:
        for container in body["spec"]["template"]["spec"]["containers"]:
            if all(each["name"] != "DD_AGENT_HOST" for each in container["env"]):
                container["env"].append({"name": "DD_AGENT_HOST", "value": "10.0.0.1"})


def _rewrites_images(kind: ResourceKind, body: Body) -> None:
    """As Kyverno's replace-image-registry does, in pods' templates of any kind."""
    if kind in (DEPLOYMENT, JOB):
        for container in body["spec"]["template"]["spec"]["containers"]:
            container["image"] = f"mirror.local/{container['image'].removeprefix('mirror.local/')}"


webhooks = pytest.mark.parametrize("webhook", [_adds_env, _rewrites_images], ids=["env", "registry"])


def _said(world) -> list[Body]:
    return [event for event in world.cluster.events if event["reason"] == "ChangedByAdmission"]


@webhooks
def test_a_new_one_gets_ready_and_it_is_said_once(
    world, tiny_spec: Body, tiny_facts: ModelFacts, webhook: Callable[[ResourceKind, Body], None]
) -> None:
    world.cluster.admission = webhook
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert world.condition("Stalled") is None
    told = [event["message"] for event in _said(world) if "Deployment" in event["message"]]
    assert len(told) == 1
    assert ("containers.env (DD_AGENT_HOST)" if webhook is _adds_env else "containers.image") in told[0]
    (pods, deployments), said = (world.cluster.of(POD), world.cluster.of(DEPLOYMENT)), len(_said(world))
    world.rest()
    world.restart_operator()
    world.settle()
    assert world.rest() == [], "nor does the next operator fight it"
    for replicas in (2, 3, 2):
        world.edit(replicas=replicas)
        world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert len(_said(world)) == said
    now, before = world.cluster.of(POD)[0], pods[0]
    assert (now["metadata"]["uid"], now["spec"]) == (before["metadata"]["uid"], before["spec"])
    assert world.cluster.of(DEPLOYMENT)[0]["spec"]["template"] == deployments[0]["spec"]["template"]


def test_it_is_said_where_the_child_changed_while_it_was_remembered(
    world, tiny_spec: Body, tiny_facts: ModelFacts
) -> None:
    refused = []

    def changed_meanwhile(request) -> None:
        """As where a controller writes the status between our write and the annotation."""
        remembers = request.verb == "json_patch" and request.kind is DEPLOYMENT and "annotations" in str(request.body)
        if remembers and not refused:
            refused.append(request)
            raise KubeError(422, "testing value /metadata/resourceVersion failed")

    world.cluster.admission, world.cluster.asked = _adds_env, changed_meanwhile
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    assert refused
    assert world.condition("Ready") == ("True", "RolledOut")
    assert len([event for event in _said(world) if "Deployment" in event["message"]]) == 1


@webhooks
def test_one_that_is_older_is_not_written_for_it(ready_world, webhook: Callable[[ResourceKind, Body], None]) -> None:
    ready_world.cluster.admission = webhook
    ready_world.rest()
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.rest() == []
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert len(_said(ready_world)) == 1
    ready_world.cluster.admission = None
    ready_world.rest()
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.rest() == [], "it stays when the webhook has gone: taking it away would replace pods"


def test_a_rival_beside_a_webhook_is_still_a_rival(ready_world) -> None:
    ready_world.cluster.admission = _adds_env
    ready_world.edit(replicas=2)
    ready_world.make_ready()

    def rival(body: Body) -> None:
        body["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "DEBUG", "value": "1"})

    for _ in range(drift.MOST_HEALS + 1):
        (body,) = ready_world.cluster.of(DEPLOYMENT)
        ready_world.cluster.change(DEPLOYMENT, body["metadata"]["name"], rival)
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    assert ready_world.condition("Available") == ("True", "Serving")


def test_a_webhook_that_acts_only_when_an_object_is_made_gives_way(
    world, tiny_spec: Body, tiny_facts: ModelFacts
) -> None:
    world.cluster.admission = _adds_env
    world.create(tiny_spec)
    world.cluster.admission = lambda kind, body: (
        _adds_env(kind, body) if kind is DEPLOYMENT and not world.cluster.of(DEPLOYMENT) else None
    )
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert "DD_AGENT_HOST" not in str(world.cluster.of(DEPLOYMENT))
    assert _said(world) == []
