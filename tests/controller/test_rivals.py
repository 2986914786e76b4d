"""Leave for downtime gives no GPU away: where others wait for it, the worker that serves stays."""

from __future__ import annotations

import pytest

from modelserve_operator.kinds import POD
from modelserve_operator.observed import Pod

MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 1}


@pytest.fixture
def full(world):
    """`big` serves on the only GPU, and may be down for a moment."""
    world.add_node("a", **H200)
    world.create({"model": MODEL, "rollout": {"allowDowntime": True}}, name="big")
    world.make_ready()
    assert world.condition("Ready", "big") == ("True", "RolledOut")
    return world


def _other_pod(world, name: str, *, priority: int = 0, resource: str = "nvidia.com/gpu", **metadata) -> None:
    """A pod of somebody else that waits for a node."""
    container = {"name": "train", "resources": {"limits": {resource: "1"}}}
    world.cluster.put(
        POD,
        {
            "metadata": {"name": name, "namespace": "other", **metadata},
            "spec": {"containers": [container], "priority": priority},
            "status": {"phase": "Pending"},
        },
    )


def _edit_without_room(world) -> tuple[str, str, set[str]]:
    """Another plan; its pod finds no room. Hashes of the old revision and the new one, and uids of ready pods."""
    old, ready = world.served_hash("big"), _ready(world)
    world.edit("big", context={"maxModelLen": 4096})
    new = world.revision("big")
    (pod,) = world.cluster.pods_of(world.deployment(new))
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[scheduled])
    world.settle()
    return old, new, ready


def _ready(world) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of(POD) if Pod.from_body(pod).ready}


def test_where_others_wait_for_the_same_gpus_the_worker_stays_and_they_are_named(full) -> None:
    _other_pod(full, "thief")
    old, new, ready = _edit_without_room(full)
    assert full.deployments() == {old: 1, new: 1}
    assert _ready(full) == ready
    assert full.condition("Available", "big") == ("True", "Serving")
    assert full.condition("CapacityAvailable", "big") == ("False", "NoSurgeCapacity")
    assert "other/thief would take the GPUs" in full.message("CapacityAvailable", "big")
    full.cluster.remove(POD, "other", "thief")
    full.pass_time(61)
    assert full.deployments() == {old: 0, new: 1}, "it has gone, and the place is ours"


@pytest.mark.parametrize(
    "other",
    [
        {"resource": "nvidia.com/mig-1g.10gb"},
        {"priority": -5},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
    ids=["another resource", "behind us", "on its way out"],
)
def test_who_would_not_take_them_does_not_count(full, other) -> None:
    _other_pod(full, "harmless", **other)
    old, new, _ = _edit_without_room(full)
    assert full.deployments() == {old: 0, new: 1}


def test_nobody_is_asked_about_where_there_is_room(full, monkeypatch: pytest.MonkeyPatch) -> None:
    full.add_node("b", **H200)
    _other_pod(full, "thief")
    monkeypatch.setattr(full.cluster, "unplaced_pods", None)
    full.edit("big", context={"maxModelLen": 4096})
    full.make_ready()
    assert full.condition("Ready", "big") == ("True", "RolledOut")
