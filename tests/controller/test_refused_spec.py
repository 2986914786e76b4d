"""A spec that is not accepted: the status says so, and nothing that nobody asked for."""

from __future__ import annotations

from modelserve_operator.cluster.kinds import DEPLOYMENT, POD
from modelserve_operator.process.metrics import REGISTRY

AIM = {"namespace": "ml", "name": "tiny", "accelerator": "NVIDIA-H200"}
DRAFTER = {"uri": "hf://google/gemma-4-31B-it-assistant"}


def _desired() -> float | None:
    return REGISTRY.get_sample_value("modelserve_replicas", {"namespace": "ml", "name": "tiny", "state": "desired"})


def test_a_new_one_is_not_said_to_be_scaled_to_zero(world, tiny_spec, tiny_facts) -> None:
    world.create({**tiny_spec, "drafter": DRAFTER})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert world.condition("Available") == ("False", "NotServing")
    assert world.cluster.of(DEPLOYMENT) == []


def test_what_ran_before_is_still_wanted_and_its_loss_is_announced(ready_world) -> None:
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    ready_world.edit(drafter=DRAFTER)
    assert ready_world.condition("Accepted") == ("False", "InvalidSpec")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert _desired() == 2, "the workers stay"
    for pod in ready_world.cluster.of(POD):
        ready_world.cluster.set_pod(pod, phase="Running", conditions=[{"type": "Ready", "status": "False"}])
    ready_world.cluster.run_controllers()
    ready_world.settle()
    assert ready_world.condition("Available") == ("False", "NotServing")
    assert "NotServing" in [event["reason"] for event in ready_world.cluster.events]
    assert list(ready_world.deployments().values()) == [2]


def test_beside_a_spec_that_nothing_can_hold_the_plan_that_runs_stays_in_the_status(world) -> None:
    """Its figures are what an autoscaler aims at; the candidates that were refused are the proposal's."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=1)
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}}, name="tiny")
    world.make_ready()
    before, plan = world.status(), world.shown_plan()
    aim = REGISTRY.get_sample_value("modelserve_target_concurrency", AIM)
    assert aim is not None
    world.edit(context={"maxModelLen": 999_999})
    assert world.condition("Stalled") == ("True", "DoesNotFit")
    assert world.condition("Available") == ("True", "Serving")
    after = world.status()
    assert (world.shown_plan(), after["revision"]) == (plan, before["revision"])
    assert [each["verdict"] for each in after["proposedPlan"]["candidates"]] == ["Refused"]
    assert "proposedRevision" not in after
    assert REGISTRY.get_sample_value("modelserve_target_concurrency", AIM) == aim
    world.edit(context=None)
    assert world.condition("Ready") == ("True", "RolledOut")
    assert "proposedPlan" not in world.status()


def test_one_that_is_scaled_to_zero_is_said_to_be(ready_world) -> None:
    ready_world.edit(replicas=0)
    assert ready_world.condition("Available") == ("False", "ScaledToZero")
    assert _desired() == 0


def test_a_preview_wants_no_worker(world) -> None:
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=1)
    world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}, "plan": {"mode": "PreviewOnly"}})
    assert world.condition("Planned") == ("True", "PlanPreviewed")
    assert _desired() == 0
