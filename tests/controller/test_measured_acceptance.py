"""How often drafts were right, from a worker's report to the next plan of the pair, and to none that is committed."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.planning.learned import pair_of
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_SERVE, POD
from modelserve_operator.inventory.measurements import Measurements
from modelserve_operator.learning.shared_config import CALIBRATION_NAME
from modelserve_operator.learning.worker_reports import REFRESH

MODEL, ASSISTANT = "hf://google/gemma-4-31B-it", "hf://google/gemma-4-31B-it-assistant"
PAIR = pair_of(MODEL, ASSISTANT)
SPEC = {"model": {"uri": MODEL}, "drafter": {"published": True}, "workload": {"concurrency": 1}}


@pytest.fixture
def measured(world):
    """`first` drafts on a GPU, and `other`, a bystander, serves without."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": {"uri": MODEL}}, name="other")
    world.create(SPEC, name="first")  # the newest worker is the one that takes back
    world.make_ready()
    _told(world, 0.4)
    return world


def _told(world, acceptance: Any) -> None:
    """The worker of `first` says so when it is asked next."""
    (pod,) = world.cluster.pods_of(world.deployment_of("first"))
    world.cluster.worker_plans[pod["metadata"]["name"]]["drafts"] = {"acceptance": acceptance}
    world.now += REFRESH
    for _ in range(2):
        world.pending = world.gatherer.known_keys()
        world.settle()


def _learned(world) -> dict[str, float]:
    found = [body for body in world.cluster.of(CONFIG_MAP) if body["metadata"]["name"] == CALIBRATION_NAME]
    entries = Measurements.from_data(found[0]["data"]).entries.values() if found else ()
    return {pair: chance for entry in entries for pair, chance in entry.acceptance.items()}


def _drafts(world, name: str) -> tuple[str, str]:
    """Source and acceptance of what the plan expects."""
    (chosen,) = [each for each in world.status(name)["plan"]["candidates"] if each["verdict"] == "Chosen"]
    drafts = chosen["speed"]["drafts"]
    return drafts["source"], drafts["acceptance"]


def test_the_next_plan_of_the_pair_expects_it_and_a_committed_one_stays(measured) -> None:
    assert _learned(measured) == {PAIR: 0.4}
    pods = {pod["metadata"]["uid"] for pod in measured.cluster.of(POD)}
    assert _drafts(measured, "first") == ("Assumed", "0.75")
    assert not {"proposedPlan", "waits"} & measured.status("first").keys()
    measured.create(SPEC, name="second")
    assert _drafts(measured, "second") == ("Measured", "0.40")
    assert measured.status("second")["plan"]["draftAcceptance"] == "0.40"
    measured.create({**SPEC, "workload": {"concurrency": 1, "draftAcceptance": "0.9"}}, name="third")
    assert _drafts(measured, "third") == ("Given", "0.90")
    measured.create({**SPEC, "model": {"uri": MODEL + "-qat-w4a16-ct"}}, name="fourth")
    assert _drafts(measured, "fourth") == ("Assumed", "0.60"), "another model with the same assistant"
    assert pods <= {pod["metadata"]["uid"] for pod in measured.cluster.of(POD)}
    _told(measured, 0.9)
    assert not {"proposedPlan", "waits"} & measured.status("second").keys()


def test_only_what_has_clearly_moved_is_written(measured) -> None:
    measured.rest()
    _told(measured, 0.44)
    assert measured.rest() == []
    assert _learned(measured) == {PAIR: 0.4}
    _told(measured, 0.5)
    assert _learned(measured) == {PAIR: 0.5}
    assert [write for write in measured.rest() if write[2] != CALIBRATION_NAME] == []


@pytest.mark.parametrize("nonsense", [1.5, -1, "often", None])
def test_what_is_no_chance_is_ignored(measured, nonsense: Any) -> None:
    _told(measured, nonsense)
    assert _learned(measured) == {PAIR: 0.4}
    assert measured.condition("Ready", "first") == ("True", "RolledOut")


def test_it_outlives_the_operator(measured) -> None:
    measured.restart_operator()
    measured.settle()
    measured.create(SPEC, name="second")
    assert _drafts(measured, "second") == ("Measured", "0.40")
    assert measured.cluster.objects[MODEL_SERVE, "ml", "other"]["status"]["readyReplicas"] == 1
