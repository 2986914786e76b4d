"""Two operators without a Lease, with different settings: the API server is not kept busy, and no worker is touched."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve_operator.cluster.kinds import DEPLOYMENT, MODEL_SERVE, POD
from modelserve_operator.settings import Settings


@pytest.fixture
def rivals(ready_world):
    """The world's operator, and one beside it with another default image."""
    other = type(ready_world)()
    other.cluster, other.settings = ready_world.cluster, Settings(worker_image="worker:2")
    other.restart_operator()

    def both(*heard: Any) -> None:
        for each in (ready_world, other):
            each._heard(*heard)

    ready_world.cluster.listener = both
    other.pending = other.gatherer.known_keys()
    return ready_world, other


def _statuses(world) -> int:
    return len([write for write in world.rest() if write[:2] == ("patch/status", "ModelServe")])


def test_they_write_less_and_less(rivals) -> None:
    one, other = rivals
    pods, deployments = one.cluster.of(POD), one.cluster.of(DEPLOYMENT)
    one.rest()
    for _ in range(20):  # no time passes
        for each in rivals:
            each.settle()
    assert _statuses(one) <= 6
    for _ in range(600):
        for each in rivals:
            each.pass_time(1)
    assert _statuses(one) <= 2 * (10 + 10), "each doubles its wait up to a minute"
    assert (one.cluster.of(POD), one.cluster.of(DEPLOYMENT)) == (pods, deployments)
    one.cluster.listener = one._heard  # the rival ends
    other.pending = set()
    one.pass_time(61)
    one.pass_time(61)
    assert "proposedRevision" not in one.status()
    one.rest()
    one.pass_time(600)
    assert _statuses(one) == 0


def test_a_status_that_is_wiped_once_is_written_at_once(ready_world) -> None:
    for _ in range(2):
        before = ready_world.status()
        ready_world.cluster.change(MODEL_SERVE, "tiny", lambda body: body.update(status={}))
        ready_world.settle()
        conditions = {each["type"]: each["status"] for each in ready_world.status()["conditions"]}
        assert conditions == {each["type"]: each["status"] for each in before["conditions"]}
        ready_world.pass_time(600)
