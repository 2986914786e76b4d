"""Where a spec has several faults the one that is told first is the one to put right first."""

from __future__ import annotations

import copy
from typing import Any

from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_operator.cluster.kinds import CLAIM, CONTROLLER_REVISION
from modelserve_operator.planning.plan import CHECKS


def _claim(world, mode: str) -> None:
    metadata = {"name": "drafters", "namespace": "ml"}
    world.cluster.put(CLAIM, {"metadata": metadata, "spec": {"accessModes": [mode]}, "status": {}})
    world.pass_time(3600)


def _put_anew(world, body: dict[str, Any]) -> None:
    world.cluster.remove(CONTROLLER_REVISION, "ml", body["metadata"]["name"])
    world.cluster.put(CONTROLLER_REVISION, body)
    world.settle()


def _planned(world) -> tuple[str, str]:
    return world.condition("Planned")[1], world.message("Planned")


def test_faults_are_told_one_by_one_in_the_order_of_the_checks(ready_world, tiny_spec, tiny_facts) -> None:
    """Everything is wrong at once; each repair lets the next fault be told."""
    world, kept = ready_world, f"tiny-{ready_world.served_hash()}"
    readable = copy.deepcopy(world.cluster.objects[CONTROLLER_REVISION, "ml", kept])
    _claim(world, "ReadWriteOnce")
    world.edit(
        replicas="many", model={"uri": "pvc://weights/other"}, drafter={"uri": "pvc://drafters/one"},
        plan={"mode": "PreviewOnly", "revision": "tiny-0123456789"}, kvCache={"hostMemory": "8Gi"},
    )  # fmt: skip
    damaged = copy.deepcopy(readable)
    damaged["data"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    _put_anew(world, damaged)
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert "replicas" in world.message("Accepted")
    world.edit(replicas=2)
    assert world.condition("Accepted") == ("False", "VolumeNotShareable")
    _claim(world, "ReadOnlyMany")
    assert _planned(world)[0] == "RevisionUnreadable"
    _put_anew(world, readable)
    reason, message = _planned(world)
    assert (reason, "reads the model" in message) == ("InspectingModel", True)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    reason, message = _planned(world)
    assert (reason, "reads the drafter" in message) == ("InspectingModel", True)
    world.cluster.end_job(message="no drafter is there", exit_code=TERMINAL_EXIT_CODE)
    world.settle()
    assert _planned(world)[0] == "RevisionUnknown"
    world.edit(plan={"mode": "PreviewOnly", "revision": kept})
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert "hostMemory" in world.message("Accepted")
    world.edit(kvCache=None)
    reason, message = _planned(world)
    assert (reason, f"Pinned by spec.plan.revision to {kept}" in message) == ("PlanCommitted", True)
    world.edit(plan={"mode": "PreviewOnly"})
    assert _planned(world)[0] == "PlanPreviewed"
    world.edit(plan={"mode": "Manual"})
    assert _planned(world)[0] == "WaitingForApproval"
    world.edit(plan={"mode": "Automatic"})
    assert _planned(world)[0] == "PlanCommitted"


def test_what_is_committed_goes_before_what_could_not_be_planned_today(world) -> None:
    big = {"model": {"uri": "hf://google/gemma-4-31B-it"}}
    world.create({**big, "plan": {"mode": "PreviewOnly"}}, name="big")
    assert world.condition("Planned", "big") == ("False", "NoAccelerators"), "as of a plan that is to be committed"
    world.create(big, name="tiny")
    world.add_node("a", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    assert [world.condition("Planned", name)[1] for name in ("big", "tiny")] == ["DoesNotFit", "DoesNotFit"]
    world.add_node("b", product="NVIDIA-H200", memory_mib=143_771, gpus=1)
    assert world.condition("Planned") == ("True", "PlanCommitted")
    world.add_node("b", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    assert world.condition("Planned", "big")[1] == "DoesNotFit"
    assert world.condition("Planned") == ("True", "PlanCommitted")


def test_the_table_of_checks_says_what_each_finds() -> None:
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert [check.__name__ for check in CHECKS if not (check.__doc__ or "").strip().endswith(".")] == []
