"""A pod that a node evicts stays behind as Failed: its Deployment replaces it, and the operator does not count it.

So it is with pressure of memory or disk and with the shutdown of a node. Nobody deletes such a pod for a long time.
"""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import DEPLOYMENT, POD

BROKEN = TerminationMessage(reason=TerminationReason.InvalidCheckpoint, message="no such file").encode()


def _evict(world, pod: dict[str, Any], *, phase: str = "Failed", exit_code: int = 137, message: str = "") -> None:
    """The kubelet ends the containers and the pod, and leaves its object; the Deployment makes another one."""
    ended = {"terminated": {"exitCode": exit_code, "message": message}}
    world.cluster.set_pod(
        pod,
        phase=phase,
        reason="Evicted",
        message="The node was low on resource: ephemeral-storage.",
        conditions=[{"type": "Ready", "status": "False"}, {"type": "DisruptionTarget", "status": "True"}],
        containerStatuses=[{"name": "worker", "restartCount": 0, "state": ended}],
    )
    world.cluster.run_controllers()
    world.settle()


def _evict_all(world, times: int) -> None:
    for _ in range(times):
        _evict(world, next(pod for pod in world.cluster.of(POD) if pod["status"]["phase"] == "Running"))
        world.make_ready()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_it_is_replaced_and_does_not_count(ready_world, phase: str) -> None:
    (pod,) = ready_world.cluster.of(POD)
    _evict(ready_world, pod, phase=phase)
    assert ready_world.status()["replicas"] == 1, "the one in its place"
    assert ready_world.condition("Available") == ("False", "NotServing")
    assert "exit code 137" not in ready_world.message("WorkersReady"), "the one in its place has no trouble"
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert (ready_world.status()["replicas"], ready_world.status()["readyReplicas"]) == (1, 1)
    ready_world.rest()
    ready_world.pass_time(3600)
    assert ready_world.rest() == []


def test_a_rollout_has_room_beside_what_was_evicted_before(ready_world) -> None:
    old = ready_world.served_hash()
    _evict_all(ready_world, 3)
    ready_world.edit(context={"maxModelLen": 1024})
    new = ready_world.revision()
    assert ready_world.deployments() == {old: 1, new: 1}, "one beside the old one, as maxSurge allows"
    assert ready_world.condition("Available") == ("True", "Serving"), "the old one serves meanwhile"
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert ready_world.served_hash() == new
    assert ready_world.deployments() == {new: 1}, "the old Deployment is gone, and with it what was left behind"
    assert all(labels.label_of(pod, labels.PLAN_HASH) == new for pod in ready_world.cluster.of(POD))


def test_a_failure_that_was_evicted_stops_no_growth(ready_world) -> None:
    (healthy,) = ready_world.cluster.of(POD)
    ready_world.edit(replicas=2)
    waiting = next(pod for pod in ready_world.cluster.of(POD) if pod["metadata"]["uid"] != healthy["metadata"]["uid"])
    _evict(ready_world, waiting, exit_code=TERMINAL_EXIT_CODE, message=BROKEN)
    assert ready_world.condition("Stalled") is None
    assert list(ready_world.deployments().values()) == [2]
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert len(ready_world.cluster.of(DEPLOYMENT)) == 1
    assert ready_world.cluster.objects[POD, "ml", healthy["metadata"]["name"]]["status"]["phase"] == "Running"
