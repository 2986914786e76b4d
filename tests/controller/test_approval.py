"""One committed plan: nodes propose, approvals decide, and what runs is always shown."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.api import ModelServe
from modelserve.planning import offers_from_nodes, plan
from modelserve.published import published_model
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_SERVE, NODE, POD

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 81_559, "gpus": 8}


def _approve(world, approved: str) -> None:
    def annotate(body: dict[str, Any]) -> None:
        body["metadata"].setdefault("annotations", {})[labels.APPROVE_PLAN] = approved

    world.cluster.change(MODEL_SERVE, "big", annotate)
    world.settle()


@pytest.fixture
def proposed(world):
    """A plan for H200 is committed and not ready yet; the nodes have become H100, and their plan is proposed."""
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.add_node("a", **H100)
    return world


def test_the_hash_is_the_planners(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    body = world.cluster.objects[MODEL_SERVE, "ml", "big"]
    spec = ModelServe.parse({key: value for key, value in body.items() if key != "status"}).spec
    facts = published_model(MODEL["uri"])
    assert facts is not None
    made = plan(spec, facts.architecture, offers_from_nodes(world.cluster.of(NODE)), weight_format=facts.format)
    status = world.status("big")
    assert status["plan"]["hash"] == made.hash
    assert status["revision"].startswith("big-")
    assert world.deployments() == {world.revision("big"): 1}


def test_an_approved_plan_stays_whatever_nodes_come_and_go(proposed) -> None:
    first, second = (proposed.status("big")[field]["hash"] for field in ("plan", "proposedPlan"))
    _approve(proposed, second)
    assert proposed.status("big")["plan"]["hash"] == second
    _approve(proposed, first)
    assert proposed.status("big")["plan"]["hash"] == first, "an earlier plan can be approved again"
    assert proposed.status("big")["proposedPlan"]["hash"] == second
    for product in (H200, H100, H200):
        proposed.add_node("a", **product)
        assert proposed.status("big")["plan"]["hash"] == first
        proposed.restart_operator()
        proposed.settle()
        assert proposed.status("big")["plan"]["hash"] == first

    def withdraw(body: dict[str, Any]) -> None:
        del body["metadata"]["annotations"]

    proposed.cluster.change(MODEL_SERVE, "big", withdraw)
    proposed.settle()
    assert proposed.status("big")["plan"]["hash"] == first, "the approval was given"
    proposed.rest()
    proposed.restart_operator()
    proposed.settle()
    assert proposed.rest() == []


def test_git_approves_by_the_hash_that_the_command_line_prints(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "Manual"}}, name="big")
    waiting = world.status("big")["proposedPlan"]["hash"]
    world.edit("big", plan={"mode": "Manual", "approvedHash": waiting})
    assert world.status("big")["plan"]["hash"] == waiting
    assert world.condition("Planned", "big") == ("True", "PlanCommitted")
    world.add_node("a", **H100)
    second = world.status("big")["proposedPlan"]["hash"]
    world.edit("big", plan={"mode": "Manual", "approvedHash": second})
    assert world.status("big")["plan"]["hash"] == second


def test_a_wrong_hash_is_answered_once_and_changes_nothing(proposed) -> None:
    before = proposed.status("big")
    _approve(proposed, "0123456789")
    assert proposed.status("big")["plan"]["hash"] == before["plan"]["hash"]
    message = proposed.message("Planned", "big")
    assert "0123456789 names no plan of this spec" in message
    assert before["plan"]["hash"] in message
    assert before["proposedPlan"]["hash"] in message
    proposed.pending = proposed.gatherer.known_keys()
    proposed.settle()
    assert [event["reason"] for event in proposed.cluster.events].count("ApprovalUnknown") == 1
    proposed.add_node("a", **H200)
    assert "names no plan" not in proposed.message("Planned", "big"), "with nothing to approve it does not matter"


def test_an_approval_of_the_plan_lets_no_later_release_restart_the_pods(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL, "plan": {"mode": "Manual"}}, name="big")
    _approve(world, world.status("big")["proposedPlan"]["hash"])
    world.make_ready()
    pods = {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}
    world.settings = world.settings.model_copy(update={"worker_image": "worker:newer"})
    world.restart_operator()
    world.settle()
    status = world.status("big")
    assert status["proposedPlan"]["hash"] == status["plan"]["hash"], "the plan is the same"
    assert status["proposedRevision"] != status["revision"]
    assert {pod["metadata"]["uid"] for pod in world.cluster.of(POD)} == pods
    _approve(world, status["proposedRevision"].removeprefix("big-"))
    assert world.status("big")["revision"] == status["proposedRevision"]


def test_the_running_plan_is_shown_while_another_waits(world) -> None:
    world.add_node("a", **H200)
    world.create({"model": MODEL}, name="big")
    world.make_ready()
    running = world.shown_plan("big")
    world.edit("big", plan={"mode": "Manual"}, context={"maxModelLen": 4096})
    assert world.condition("Planned", "big") == ("False", "WaitingForApproval")
    assert world.shown_plan("big") == running
    assert world.status("big")["proposedPlan"]["hash"] != running["hash"]
    assert world.condition("Available", "big") == ("True", "Serving")
    world.edit("big", context={"maxModelLen": 1, "minModelLen": 2})
    assert world.condition("Accepted", "big") == ("False", "InvalidSpec")
    assert world.shown_plan("big") == running
