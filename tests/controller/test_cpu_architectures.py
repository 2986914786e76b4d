"""Revisions of releases that knew nothing of CPUs go on as they are, whatever is planned beside them today."""

from __future__ import annotations

import pytest

from modelserve_operator.cluster.kinds import DEPLOYMENT, NODE

ARCH = "kubernetes.io/arch"
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 4}


def _told(world, cpus: str) -> None:
    """Nodes without the label stand for a release that did not read it: their plans say nothing of it."""
    world.cluster.change(NODE, "a", lambda node: node["metadata"]["labels"].update({ARCH: cpus}))
    world.settle()


@pytest.mark.parametrize("replan", [None, {"when": "Lost"}, {"when": "Better"}])
@pytest.mark.parametrize("cpus", ["amd64", "arm64"])
def test_what_runs_stays_when_cpus_come_to_be_known(world, cpus: str, replan: dict[str, str] | None) -> None:
    """On x86-64 not even another plan is proposed; on Arm none fits today, and the workers that run there are left."""
    world.add_node("a", **H200)
    plan = {"plan": {"replan": replan}} if replan else {}
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}, **plan}, name="big")
    world.make_ready()
    before, (deployment,) = world.status("big"), world.cluster.of(DEPLOYMENT)
    world.rest()
    _told(world, cpus)
    world.pass_time(7200)
    world.settle()
    after, (still,) = world.status("big"), world.cluster.of(DEPLOYMENT)
    assert still["spec"] == deployment["spec"]
    assert after["plan"]["hash"] == before["plan"]["hash"]
    assert after["plan"]["nodeSelectorTerms"] == before["plan"]["nodeSelectorTerms"]
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    assert "proposedPlan" not in after
    assert world.condition("Stalled", "big") is None
    world.edit("big", pod={"labels": {"team": "x"}})
    assert ARCH not in str(world.cluster.of(DEPLOYMENT)), "an edit of pods keeps the plan and its places"


def test_a_new_plan_names_the_cpus(world) -> None:
    world.add_node("a", **H200)
    _told(world, "amd64")
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}}, name="big")
    (term,) = world.status("big")["plan"]["nodeSelectorTerms"]
    assert {"key": ARCH, "operator": "In", "values": ["amd64"]} in term["matchExpressions"]


def test_arm_is_refused_where_the_image_is_not_built_for_it(world) -> None:
    world.add_node("a", **H200)
    _told(world, "arm64")
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}}, name="big")
    (candidate,) = world.status("big")["plan"]["candidates"]
    assert (candidate["verdict"], candidate["limitedBy"]) == ("Refused", "Architecture")
    assert world.condition("Stalled", "big") == ("True", "DoesNotFit")
    assert world.cluster.of(DEPLOYMENT) == []
