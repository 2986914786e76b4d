"""A re-size under way: how many workers take requests at every moment, and who selects them."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, ENDPOINT_SLICE, POD, SERVICE

REPLICAS = 6


@pytest.fixture
def six(ready_world):
    """Six ready workers; `endpoints`, `replicas` and `selectors` keep what was seen after every reconcile."""
    world = ready_world
    world.edit(replicas=REPLICAS)
    for _ in range(REPLICAS):
        world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    world.endpoints, world.replicas, world.selectors = [], [], []

    def record() -> None:
        (body,) = world.cluster.of(ENDPOINT_SLICE)
        world.endpoints.append(len(body["endpoints"]))
        world.replicas.append(world.status()["replicas"])
        world.selectors.append(world.cluster.of(SERVICE)[0]["spec"]["selector"])

    world.after_each = record
    return world


def _roll(world, old: str) -> None:
    """New pods turn ready as they come, until the old revision is gone."""
    for _ in range(2 * REPLICAS):
        for body in world.cluster.of(DEPLOYMENT):
            if labels.label_of(body, labels.PLAN_HASH) != old:
                world.cluster.make_ready(body)
        world.settle()
    assert old not in world.deployments()
    assert world.condition("Ready") == ("True", "RolledOut")


def test_both_revisions_serve_where_clients_find_the_same_on_both(six) -> None:
    old = six.served_hash()
    six.edit(context={"maxModelLen": 4096})
    (new,) = set(six.deployments()) - {old}
    six.cluster.make_ready(six.deployment(new))
    six.settle()
    (service,) = six.cluster.of(SERVICE)
    assert service["spec"]["selector"] == labels.selector("tiny")
    assert six.status()["readyReplicas"] >= REPLICAS
    assert "both revisions" in six.message("Available")
    assert six.status()["maxModelLen"] == 2048, "what holds on every worker"
    _roll(six, old)
    assert min(six.endpoints) >= REPLICAS
    assert min(six.replicas) >= REPLICAS, "what an autoscaler reads"
    assert six.served_hash() == new
    assert six.status()["maxModelLen"] == 4096


@pytest.mark.parametrize(
    "change", [{"context": {"maxModelLen": 1024}}, {"model": {"uri": "pvc://weights/tiny", "servedName": "x"}}]
)
def test_otherwise_one_revision_serves_at_a_time(six, change: dict[str, Any]) -> None:
    old = six.served_hash()
    six.edit(**change)
    _roll(six, old)
    order = list(dict.fromkeys(selector.get(labels.PLAN_HASH) for selector in six.selectors))
    assert order[:2] == [old, six.served_hash()], "it switches"
    assert (None in order) is ("context" in change), "and then the shorter context holds on both; a name never does"
    assert min(six.replicas) >= REPLICAS


def test_a_change_of_mind_half_way_keeps_what_serves(six) -> None:
    """Back to the first spec: the promise of the moment, the shorter context, holds on both."""
    old = six.served_hash()
    six.edit(context={"maxModelLen": 4096})
    for _ in range(3):
        for body in six.cluster.of(DEPLOYMENT):
            six.cluster.make_ready(body)
        six.settle()
    assert set(six.deployments()) > {old}
    six.edit(context={"maxModelLen": 2048})
    _roll(six, next(iter(set(six.deployments()) - {old})))
    assert six.served_hash() == old
    assert min(six.endpoints) >= REPLICAS


def test_a_third_plan_half_way_keeps_what_serves(six) -> None:
    old = six.served_hash()
    six.edit(context={"maxModelLen": 3072})
    for _ in range(3):
        for body in six.cluster.of(DEPLOYMENT):
            six.cluster.make_ready(body)
        six.settle()
    second = next(iter(set(six.deployments()) - {old}))
    six.edit(context={"maxModelLen": 4096})
    third = next(iter(set(six.deployments()) - {old, second}))
    for _ in range(3 * REPLICAS):
        six.cluster.make_ready(six.deployment(third))
        six.settle()
    assert six.deployments() == {third: REPLICAS}
    assert min(six.endpoints) >= REPLICAS


def test_with_as_much_surge_as_replicas_a_single_switch_keeps_the_floor(six) -> None:
    old = six.served_hash()
    six.edit(context={"maxModelLen": 1024}, rollout={"maxSurge": REPLICAS})
    _roll(six, old)
    assert min(six.endpoints) >= REPLICAS


def test_an_old_deployment_whose_config_map_is_lost_goes_too(ready_world) -> None:
    old = ready_world.served_hash()
    ready_world.edit(context={"maxModelLen": 1024})
    ready_world.cluster.remove(CONFIG_MAP, "ml", f"tiny-{old}")
    ready_world.settle()
    (new,) = (body for body in ready_world.cluster.of(DEPLOYMENT) if old not in body["metadata"]["name"])
    ready_world.cluster.make_ready(new)
    ready_world.settle()
    assert old not in ready_world.deployments()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_the_old_deployment_stays_while_its_pods_drain(ready_world) -> None:
    """Without it the disruption budget cannot count the pods that it selects."""
    world = ready_world
    old = world.served_hash()
    keep = {pod["metadata"]["name"] for pod in world.cluster.of(POD)}
    remove = world.cluster.remove

    def drain(kind: Any, namespace: str, name: str) -> None:
        if kind is POD and name in keep:
            world.cluster.change(
                POD, name, lambda body: body["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z")
            )
        else:
            remove(kind, namespace, name)

    world.cluster.remove = drain
    world.edit(context={"maxModelLen": 1024})
    for _ in range(3):
        (new,) = (body for body in world.cluster.of(DEPLOYMENT) if labels.label_of(body, labels.PLAN_HASH) != old)
        world.cluster.make_ready(new)
        world.settle()
    assert world.deployments()[old] == 0
    assert world.condition("Ready") == ("True", "RolledOut"), "the new plan is rolled out"
    (pod,) = keep
    remove(POD, "ml", pod)
    world.settle()
    assert old not in world.deployments()
    assert len(world.cluster.of(DISRUPTION_BUDGET)) == 1
