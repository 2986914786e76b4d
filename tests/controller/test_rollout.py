"""The rollout as a whole: random clusters step until they rest, and never serve less than they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api.spec import RolloutSpec
from modelserve_operator.observed.snapshot import Failure
from modelserve_operator.observed.terminal_failure import FailureRecord
from modelserve_operator.rollout.next_step import Exchange, Replacement, RunningRevision, Step, next_step

OLD, NEW = "old0000000", "new0000000"
FAILED = FailureRecord(Failure("InvalidCheckpoint", "broken"))


def _simulate(
    *, replicas: int, surge: int, allow_downtime: bool, capacity: int, start: dict[str, RunningRevision]
) -> tuple[list[dict[str, RunningRevision]], Step, str]:
    """Apply steps and let the cluster follow (as far as `capacity` pods have room) until nothing changes."""
    rollout = RolloutSpec(max_surge=surge, allow_downtime=allow_downtime)
    running, serving, history = dict(start), OLD, [dict(start)]
    for _ in range(100):
        step = next_step(target=NEW, running=running, serving=serving, replicas=replicas, rollout=rollout)
        after = {key: revision for key, revision in running.items() if key not in step.delete}
        for plan_hash, wanted in step.replicas.items():
            revision = after.get(plan_hash, RunningRevision(plan_hash, 0))
            after[plan_hash] = replace(
                revision, replicas=wanted, pods=min(revision.pods, wanted), ready=min(revision.ready, wanted)
            )
        for plan_hash in sorted(after, reverse=True):  # pods that run keep their room; one more pod starts per round
            revision = after[plan_hash]
            used = sum(each.pods - each.unschedulable for each in after.values() if each.hash != plan_hash)
            room = max(0, capacity - used)
            pods = revision.replicas
            after[plan_hash] = replace(
                revision,
                pods=pods,
                ready=min(revision.pods, room, revision.ready + 1),  # a pod is ready a round after it was made
                unschedulable=max(0, pods - room),
            )
        serving = step.serve or serving
        history.append(after)
        if after == running and step.serve == serving:
            return history, step, serving
        running = after
    raise AssertionError(f"no rest: {history[-3:]}")


@given(replicas=st.integers(1, 6), surge=st.integers(1, 6), old_ready=st.booleans())
def test_a_rollout_with_room_to_surge_ends_and_never_drops_below_replicas(
    replicas: int, surge: int, old_ready: bool
) -> None:
    start = {OLD: RunningRevision(OLD, replicas, pods=replicas, ready=replicas if old_ready else 0)}
    history, step, serving = _simulate(
        replicas=replicas, surge=surge, allow_downtime=False, capacity=replicas + surge, start=start
    )
    assert step.complete
    assert serving == NEW
    assert set(history[-1]) == {NEW}
    for state in history:
        assert sum(revision.pods for revision in state.values()) <= replicas + surge
        if old_ready:
            assert sum(revision.ready for revision in state.values()) >= replicas


@given(replicas=st.integers(1, 4), surge=st.integers(1, 4))
def test_without_room_the_old_revision_stays_whole(replicas: int, surge: int) -> None:
    start = {OLD: RunningRevision(OLD, replicas, pods=replicas, ready=replicas)}
    history, step, serving = _simulate(
        replicas=replicas, surge=surge, allow_downtime=False, capacity=replicas, start=start
    )
    assert (serving, step.blocked, step.complete) == (OLD, True, False)
    assert all(state[OLD].ready == replicas for state in history)


@given(replicas=st.integers(1, 4), surge=st.integers(0, 4))
def test_with_leave_for_downtime_it_ends_without_room(replicas: int, surge: int) -> None:
    start = {OLD: RunningRevision(OLD, replicas, pods=replicas, ready=replicas)}
    history, step, serving = _simulate(
        replicas=replicas, surge=surge, allow_downtime=True, capacity=replicas, start=start
    )
    assert step.complete
    assert serving == NEW
    for state in history:
        ready = sum(revision.ready for revision in state.values())
        assert ready >= replicas - max(1, surge), "no more stop than make room for what tries"


@pytest.mark.parametrize(
    ("exchange", "replicas"), [(Exchange.SOME, {OLD: 0, NEW: 1}), (Exchange.NONE, {OLD: 4, NEW: 1})]
)
def test_downtime_frees_what_helps(exchange: Exchange, replicas: dict[str, int]) -> None:
    """Several pods where the new one needs more GPUs; none where it runs on other nodes."""
    running = {
        OLD: RunningRevision(OLD, 4, pods=4, ready=4, loaded=4),
        NEW: RunningRevision(NEW, 1, pods=1, unschedulable=1),
    }
    step = next_step(
        target=NEW,
        running=running,
        serving=OLD,
        replicas=4,
        rollout=RolloutSpec(allow_downtime=True),
        replacement={OLD: Replacement(exchange=exchange)},
    )
    assert step.replicas == replicas


@given(replicas=st.integers(1, 6), new_ready=st.integers(0, 6), surge=st.integers(1, 3), compatible=st.booleans())
def test_both_are_served_where_clients_find_on_both_what_they_were_promised(
    replicas: int, new_ready: int, surge: int, compatible: bool
) -> None:
    ready = min(new_ready, replicas)
    running = {
        OLD: RunningRevision(OLD, replicas - ready, pods=replicas - ready, ready=replicas - ready),
        NEW: RunningRevision(NEW, ready, pods=ready, ready=ready),
    }
    step = next_step(
        target=NEW,
        running=running,
        serving=OLD,
        replicas=replicas,
        rollout=RolloutSpec(max_surge=surge),
        replacement={OLD: Replacement(compatible=compatible)},
    )
    assert step.shared is (compatible and 0 < ready < replicas)


def test_a_third_revision_is_never_served_beside_the_two() -> None:
    running = {
        OLD: RunningRevision(OLD, 1, pods=1, ready=1),
        NEW: RunningRevision(NEW, 1, pods=1, ready=1),
        "mid0000000": RunningRevision("mid0000000", 1, pods=1),
    }
    manner = {OLD: Replacement(compatible=True)}
    step = next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=RolloutSpec(), replacement=manner)
    assert not step.shared, "unless it is compatible, too"


def test_no_surge_and_no_downtime_changes_nothing() -> None:
    running = {OLD: RunningRevision(OLD, 2, pods=2, ready=2)}
    step = next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=RolloutSpec(max_surge=0))
    assert step == Step({OLD: 2, NEW: 0}, OLD, blocked=True)


@pytest.mark.parametrize("old_ready", [0, 2])
def test_a_failed_revision_stops_and_the_old_one_stays(old_ready: int) -> None:
    running = {
        OLD: RunningRevision(OLD, 2, pods=2, ready=old_ready),
        NEW: RunningRevision(NEW, 2, pods=2, failed=2, record=FAILED),
    }
    step = next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=RolloutSpec())
    assert step == Step({OLD: 2, NEW: 0}, OLD)


@given(data=st.data(), replicas=st.integers(0, 6), surge=st.integers(0, 3), allow_downtime=st.booleans())
def test_while_workers_fail_no_ready_pod_is_asked_to_go_but_for_another(
    data: st.DataObject, replicas: int, surge: int, allow_downtime: bool
) -> None:
    """Whatever runs in whatever state: what is left of ready pods is at least what was, up to what is wanted."""
    running = {}
    for plan_hash in (OLD, NEW):
        asked = data.draw(st.integers(0, 6))
        pods = data.draw(st.integers(0, asked + 1))
        failed = data.draw(st.integers(0, pods))
        ready = data.draw(st.integers(0, pods - failed))
        record = data.draw(st.sampled_from([FAILED, replace(FAILED, trying=True)])) if plan_hash == NEW else None
        running[plan_hash] = RunningRevision(
            plan_hash,
            asked,
            pods=pods,
            ready=ready,
            loaded=ready,
            failed=0 if plan_hash == OLD else failed,
            record=record,
        )
    rollout = RolloutSpec(max_surge=surge, allow_downtime=allow_downtime)
    step = next_step(target=NEW, running=running, serving=OLD, replicas=replicas, rollout=rollout)
    left = {key: min(each.ready, step.replicas.get(key, 0)) for key, each in running.items()}
    assert left[NEW] >= min(replicas, min(running[NEW].ready, running[NEW].replicas))
    assert sum(left.values()) >= min(replicas, sum(min(each.ready, each.replicas) for each in running.values()))
    assert running[NEW].record.trying or step.replicas[NEW] <= running[NEW].replicas


def test_leave_for_downtime_is_taken_once_and_given_back_after_a_failure() -> None:
    rollout = RolloutSpec(max_surge=0, allow_downtime=True)
    running = {OLD: RunningRevision(OLD, 0), NEW: RunningRevision(NEW, 2, pods=2, failed=2, record=FAILED)}
    assert next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=rollout).replicas == {OLD: 2, NEW: 0}
    again = replace(FAILED, trying=True)
    running = {OLD: RunningRevision(OLD, 2, pods=2, ready=2, loaded=2), NEW: RunningRevision(NEW, 0, record=again)}
    step = next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=rollout)
    assert (step.replicas, step.blocked) == ({OLD: 2, NEW: 0}, True)


def test_a_revision_that_was_superseded_before_it_was_ready_goes() -> None:
    running = {
        OLD: RunningRevision(OLD, 1, pods=1, ready=1),
        "mid0000000": RunningRevision("mid0000000", 1, pods=1),
    }
    step = next_step(target=NEW, running=running, serving=OLD, replicas=1, rollout=RolloutSpec())
    assert (step.replicas["mid0000000"], step.delete) == (0, ())
    running["mid0000000"] = RunningRevision("mid0000000", 0, leaving=1)
    step = next_step(target=NEW, running=running, serving=OLD, replicas=1, rollout=RolloutSpec())
    assert step.delete == (), "its Deployment stays while pods drain: the disruption budget counts by it"
    running["mid0000000"] = RunningRevision("mid0000000", 0)
    step = next_step(target=NEW, running=running, serving=OLD, replicas=1, rollout=RolloutSpec())
    assert step.delete == ("mid0000000",)
    assert step.serve == OLD


def test_without_a_plan_what_serves_stays_and_follows_replicas() -> None:
    running = {OLD: RunningRevision(OLD, 1, pods=1, ready=1)}
    step = next_step(target=None, running=running, serving=OLD, replicas=3, rollout=RolloutSpec())
    assert step == Step({OLD: 3}, OLD)


def test_the_service_stays_with_the_new_revision_while_it_has_any_ready_pod() -> None:
    running = {OLD: RunningRevision(OLD, 2, pods=2, ready=2), NEW: RunningRevision(NEW, 3, pods=3, ready=1)}
    rollout = RolloutSpec(max_surge=1)
    assert next_step(target=NEW, running=running, serving=NEW, replicas=3, rollout=rollout).serve == NEW
    running[NEW] = replace(running[NEW], ready=0)
    assert next_step(target=NEW, running=running, serving=NEW, replicas=3, rollout=rollout).serve == OLD


@given(replicas=st.integers(1, 4), surge=st.integers(0, 4), scaled_to_zero=st.booleans())
def test_an_old_revision_that_never_got_ready_makes_room(replicas: int, surge: int, scaled_to_zero: bool) -> None:
    stuck = 0 if scaled_to_zero else replicas
    start = {OLD: RunningRevision(OLD, stuck, pods=stuck, ready=0)}
    rollout = RolloutSpec(max_surge=surge)
    running, serving = dict(start), OLD
    for _ in range(20):  # the old pods never get ready, and hold all the room there is
        step = next_step(target=NEW, running=running, serving=serving, replicas=replicas, rollout=rollout)
        assert not step.blocked
        running = {key: each for key, each in running.items() if key not in step.delete}
        for plan_hash, wanted in step.replicas.items():
            each = running.get(plan_hash, RunningRevision(plan_hash, 0))
            running[plan_hash] = replace(each, replicas=wanted, pods=wanted, unschedulable=0)
        room = replicas - (running[OLD].pods if OLD in running else 0)
        if NEW in running:
            pods = running[NEW].pods
            running[NEW] = replace(running[NEW], ready=min(pods, room), unschedulable=max(0, pods - room))
        assert sum(each.pods for each in running.values()) <= replicas + surge
        serving = step.serve or serving
    assert step.complete
    assert serving == NEW


def test_pods_that_are_yet_to_come_back_keep_their_room() -> None:
    running = {OLD: RunningRevision(OLD, 3, pods=2, ready=2)}
    step = next_step(target=NEW, running=running, serving=OLD, replicas=3, rollout=RolloutSpec(max_surge=1))
    assert step.replicas == {OLD: 3, NEW: 1}


def test_a_new_revision_does_not_wake_one_that_was_scaled_to_zero() -> None:
    running = {OLD: RunningRevision(OLD, 0)}
    step = next_step(target=NEW, running=running, serving=OLD, replicas=2, rollout=RolloutSpec())
    assert step.replicas == {OLD: 0, NEW: 2}


@pytest.mark.parametrize("surge", [0, 1])
def test_a_loaded_revision_stays_while_its_readiness_is_away(surge: int) -> None:
    running = {
        OLD: RunningRevision(OLD, 1, pods=1, loaded=1),
        NEW: RunningRevision(NEW, surge, pods=surge, unschedulable=surge),
    }
    rollout = RolloutSpec(max_surge=surge)
    step = next_step(target=NEW, running=running, serving=OLD, replicas=1, rollout=rollout)
    assert (step.replicas, step.blocked) == ({OLD: 1, NEW: surge}, True)
