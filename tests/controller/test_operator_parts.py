"""The parts around the reconcile: queue, store, diff, settings, watchdog, endpoint."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from modelserve.errors import InvalidInput
from modelserve_operator.cluster import diff
from modelserve_operator.cluster.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    MODEL_SERVE,
    NODE,
    NODE_POOL,
    POD,
    WATCHED,
    ResourceKind,
)
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.cluster.store import Store
from modelserve_operator.gathering.handlers import build_settings
from modelserve_operator.gathering.heard import Heard
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.gathering.watchdog import Watchdog, WatchFrozenError
from modelserve_operator.learning.shared_config import CALIBRATION_NAME
from modelserve_operator.process import endpoint
from modelserve_operator.process.work_queue import Key, WorkQueue
from modelserve_operator.reporting import resource_metrics
from modelserve_operator.settings import from_environment

A, B = Key("ml", "a"), Key("ml", "b")


async def test_the_queue_runs_a_key_once_however_often_it_is_added() -> None:
    seen: list[Key] = []

    async def reconcile(key: Key) -> None:
        seen.append(key)

    queue = WorkQueue()
    for key in (A, A, B, A):
        queue.add(key)
    await _run(queue, reconcile, until=lambda: len(seen) == 2)
    assert seen == [A, B]


async def test_a_key_is_never_reconciled_twice_at_a_time_and_runs_again_when_added_meanwhile() -> None:
    running, most, runs = 0, 0, 0
    queue = WorkQueue()

    async def reconcile(_: Key) -> None:
        nonlocal running, most, runs
        running, runs = running + 1, runs + 1
        most = max(most, running)
        if runs == 1:
            queue.add(A)
            queue.add(A)
        await asyncio.sleep(0.01)
        running -= 1

    queue.add(A)
    await _run(queue, reconcile, until=lambda: runs == 2)
    assert (most, runs) == (1, 2)


async def test_a_failing_key_backs_off_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[Key] = []

    async def reconcile(key: Key) -> None:
        tries.append(key)
        if key is A and tries.count(A) < 3:
            raise RuntimeError("the API server said no")

    queue = WorkQueue(first_delay=0.01)
    queue.add(A)
    queue.add(B)
    await _run(queue, reconcile, until=lambda: tries.count(A) == 3)
    assert (tries.count(A), tries.count(B)) == (3, 1)
    assert "2 in a row" in caplog.text


async def test_a_reconcile_may_ask_to_run_again() -> None:
    runs = 0

    async def reconcile(_: Key) -> float | None:
        nonlocal runs
        runs += 1
        return 0.01 if runs < 3 else None

    queue = WorkQueue()
    queue.add(A)
    await _run(queue, reconcile, until=lambda: runs == 3)
    assert runs == 3


async def _run(queue: WorkQueue, reconcile: Any, *, until: Callable[[], bool]) -> None:
    """Until then, and a little longer, for what should not come behind it."""
    task = asyncio.create_task(queue.run(reconcile, workers=4))
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110 - nothing tells when it changes
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _body(version: int, *, uid: str = "u", owner: str = "tiny") -> dict[str, Any]:
    labels = {"serving.modelserve.dev/name": owner}
    return {"metadata": {"name": "x", "namespace": "ml", "uid": uid, "resourceVersion": str(version), "labels": labels}}


def test_the_store_keeps_the_newest_version_and_forgets_no_namesake() -> None:
    store = Store()
    assert store.put(CONFIG_MAP, _body(5))
    assert not store.put(CONFIG_MAP, _body(5)), "an echo of our own write"
    assert not store.put(CONFIG_MAP, _body(4)), "an event that was overtaken"
    assert store.put(CONFIG_MAP, _body(2, uid="v")), "deleted and made anew"
    store.remove(CONFIG_MAP, _body(5))
    assert store.get(CONFIG_MAP, "ml", "x") is not None
    store.remove(CONFIG_MAP, _body(2, uid="v"))
    assert store.get(CONFIG_MAP, "ml", "x") is None
    assert store.children(CONFIG_MAP, namespace="ml", owner="tiny") == ()


def test_the_store_finds_children_by_their_present_label() -> None:
    store = Store()
    store.put(POD, _body(1))
    store.put(POD, _body(2, owner="other"))
    assert store.children(POD, namespace="ml", owner="tiny") == ()
    assert len(store.children(POD, namespace="ml", owner="other")) == 1


@pytest.mark.parametrize(
    ("live", "desired", "covered"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"c": [{"name": "w", "image": "i", "x": 0}, {"name": "sidecar"}]}, {"c": [{"name": "w", "image": "i"}]}, True),
        ({"c": [{"name": "w", "image": "j"}]}, {"c": [{"name": "w", "image": "i"}]}, False),
        ({"c": []}, {"c": [{"name": "w"}]}, False),
        ({"args": ["a", "b"]}, {"args": ["a"]}, False),
        ({"limits": {"cpu": "500m"}}, {"limits": {"cpu": "0.5"}}, True),
        ({"limits": {"memory": "3Gi"}}, {"limits": {"memory": "3221225472"}}, True),
        ({"limits": {"memory": "3G"}}, {"limits": {"memory": "3Gi"}}, False),
        ({"x": "500m"}, {"x": "0.5"}, False),
        ({"requests": {"cpu": "1m"}}, {"requests": {"cpu": "0.0005"}}, True),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": ""}]}, True),
        ({"env": [{"name": "A", "value": "x"}]}, {"env": [{"name": "A", "value": ""}]}, False),
        (
            {"t": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"t": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            True,
        ),
        (
            {"t": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"t": [{"key": "gpu", "effect": "NoExecute"}]},
            False,
        ),
    ],
)
def test_diff_compares_only_what_is_ours(live: Any, desired: Any, covered: bool) -> None:
    assert diff.covers(live, desired) is covered


def test_a_dropped_field_shows_in_the_applied_hash() -> None:
    before = diff.with_applied_hash({"metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}})
    after = diff.with_applied_hash({"metadata": {"name": "x"}, "spec": {"a": 1}})
    assert not diff.covers(before, after)


def test_what_is_not_covered_is_said_by_the_path_of_its_field() -> None:
    live = {"spec": {"template": {"spec": {"a": 1, "b": [2]}}, "replicas": 3}, "metadata": {"name": "x", "uid": "u"}}
    desired = {
        "spec": {"template": {"spec": {"a": 1, "b": [3], "c": {"d": 4}}}, "replicas": 3},
        "metadata": {"name": "x"},
    }
    assert diff.uncovered(live, desired) == {"spec.template.spec.b": [2], "spec.template.spec.c": None}
    assert diff.uncovered(live, live) == {}


def test_settings_come_from_the_environment_and_unknown_ones_are_errors() -> None:
    read = from_environment({"MODELSERVE_WATCH_NAMESPACES": "a, b", "MODELSERVE_RESYNC_SECONDS": "30", "PATH": "/bin"})
    assert read.watch_namespaces == ("a", "b")
    assert read.resync_seconds == 30
    with pytest.raises(InvalidInput, match=r"MODELSERVE_WORKER_IMAG='x'; known settings: MODELSERVE_WORKER_IMAGE"):
        from_environment({"MODELSERVE_WORKER_IMAG": "x"})
    with pytest.raises(InvalidInput, match="MODELSERVE_METRICS_PORT='70000'"):
        from_environment({"MODELSERVE_METRICS_PORT": "70000"})


async def test_the_watchdog_raises_when_a_watch_brings_nothing(world) -> None:
    world.cluster.listener = None
    world.cluster.put(
        DEPLOYMENT,
        {"metadata": {"name": "d", "namespace": "ml", "labels": {"app.kubernetes.io/managed-by": "modelserve"}}},
    )
    queue = WorkQueue()
    dog = QuickWatchdog(world.gatherer, Replanning(world.gatherer, queue), interval=0.01, resync=100)
    with pytest.raises(WatchFrozenError, match="deployments"):
        await asyncio.wait_for(dog.run(), 2)


class QuickWatchdog(Watchdog):
    grace_seconds = 0.01


async def _content_with_five_checks(dog: Watchdog, world: Any) -> None:
    checks, enough = itertools.count(1), asyncio.Event()

    def count(request: Any) -> None:
        if (request.verb, request.kind) == ("pages", MODEL_SERVE) and next(checks) > 5:  # the fifth has been judged
            enough.set()

    world.cluster.asked = count
    running, waiting = asyncio.create_task(dog.run()), asyncio.create_task(enough.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), running.exception()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("late", ["keys wait", "events come"])
async def test_a_busy_operator_that_hears_late_is_not_frozen(late: str, world) -> None:
    world.cluster.listener = None
    serve = {"metadata": {"name": "m", "namespace": "ml"}, "spec": {"model": {"uri": "pvc://weights/x"}}}
    world.cluster.put(MODEL_SERVE, serve)
    queue = WorkQueue()
    dog = QuickWatchdog(world.gatherer, Replanning(world.gatherer, queue), interval=0.01, resync=100)
    heard = asyncio.Event()

    async def old_events() -> None:
        while not heard.is_set():
            world.gatherer.heard_events[MODEL_SERVE] += 1
            await asyncio.sleep(0.001)

    telling = asyncio.create_task(old_events()) if late == "events come" else None
    await _content_with_five_checks(dog, world)
    heard.set()
    if telling is not None:
        await telling
    assert Key("ml", "m") in world.gatherer.known_keys(), "what was not heard was listed"
    queue.add(Key("ml", "m"))
    await _run(queue, lambda _: asyncio.sleep(0), until=lambda: queue.depth == 0)
    with pytest.raises(WatchFrozenError, match="modelserves"):
        await asyncio.wait_for(dog.run(), 60)


async def test_at_rest_nothing_is_listed_but_soon_after_the_start(world) -> None:
    listed, pulses, beat = [], 0, asyncio.Event()

    class BusyWatchdog(Watchdog):
        grace_seconds, first_check_seconds, pulse_seconds = 0.0, 0.0, 0.001

    def noted(request: Any) -> None:
        nonlocal pulses
        listed.extend([pulses] if (request.verb, request.kind) == ("pages", POD) else [])
        pulses += (request.verb, request.name) == ("get", CALIBRATION_NAME)
        if pulses == 5:
            beat.set()

    world.cluster.asked = noted
    world.gatherer.heard_version = dict.fromkeys(WATCHED, 10**9)
    dog = BusyWatchdog(world.gatherer, Replanning(world.gatherer, WorkQueue()), interval=3600, resync=3600)
    dog.last_round_trip = before = 0.0
    running = asyncio.create_task(dog.run())
    await asyncio.wait_for(beat.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert listed == [0], "once, for what fell between the first list and the watches"
    assert dog.last_round_trip > before, "and the probe knows that the API server answers"


def test_a_stream_without_bookmarks_is_asked_for_again() -> None:
    """The API server sends one a minute."""
    assert 60 < build_settings().watching.inactivity_timeout < 75


async def test_the_watchdog_is_content_with_live_watches_and_queues_what_they_missed(
    world,
) -> None:
    body = {"metadata": {"name": "m", "namespace": "ml"}, "spec": {"model": {"uri": "pvc://weights/x"}}}
    world.cluster.listener = None
    stored = world.cluster.put(MODEL_SERVE, body)
    world.gatherer.heard_version[MODEL_SERVE] = int(stored["metadata"]["resourceVersion"])
    queue = WorkQueue()
    dog = QuickWatchdog(world.gatherer, Replanning(world.gatherer, queue), interval=0.01, resync=100)
    await _content_with_five_checks(dog, world)
    assert dog.alive()
    seen: list[Key] = []

    async def reconcile(key: Key) -> None:
        seen.append(key)

    await _run(queue, reconcile, until=lambda: seen != [])
    assert seen == [Key("ml", "m")]


async def test_a_listing_is_older_than_the_events_heard_meanwhile(world) -> None:
    body = {"metadata": {"name": "gone", "namespace": "ml"}, "spec": {"model": {"uri": "pvc://weights/x"}}}
    world.cluster.put(MODEL_SERVE, body)

    def overtake(request: Any) -> None:
        if (request.verb, request.kind) == ("pages", MODEL_SERVE):
            world.cluster.put(MODEL_SERVE, {**body, "metadata": {"name": "made", "namespace": "ml"}})
            world.cluster.remove(MODEL_SERVE, "ml", "gone")

    world.cluster.answered = overtake
    await world.gatherer.relist()
    assert world.gatherer.known_keys() == {Key("ml", "made")}


@pytest.mark.parametrize(("refused", "status", "healed"), [
    (DEPLOYMENT, 0, (0, False)), (DEPLOYMENT, 500, (1, False)), (NODE_POOL, 500, (1, True)),
])  # fmt: skip
async def test_a_kind_that_cannot_be_listed_keeps_no_other_from_being_healed(
    world, refused: ResourceKind, status: int, healed: tuple[int, bool]
) -> None:
    """Where nobody answers nothing more is asked for. A ModelServe is not known without its children. What a pass has
    found is reconciled when the next one goes through."""
    node_labels = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8"}
    world.cluster.put(MODEL_SERVE, {"metadata": {"name": "known", "namespace": "ml"}, "spec": {}})
    world.cluster.listener = None  # the watches are away
    world.cluster.put(MODEL_SERVE, {"metadata": {"name": "missed", "namespace": "ml"}, "spec": {}})
    world.cluster.put(NODE, {"metadata": {"name": "a", "labels": node_labels}, "status": {}})

    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("pages", refused):
            raise KubeError(status, "not now")

    world.cluster.asked = refuse
    with pytest.raises(KubeError, match="not now"):
        await world.gatherer.relist()
    observed = await world.gatherer.observe(Key("ml", "known"))
    assert (len(observed.supply.pools), Key("ml", "missed") in world.gatherer.known_keys()) == healed
    world.cluster.asked = None
    heard, _ = await world.gatherer.relist()
    assert heard == Heard(frozenset({Key("ml", "missed")}), supply=True)
    assert (await world.gatherer.relist())[0].keys == set(), "once"


async def test_a_listing_finds_out_that_a_node_is_gone(world) -> None:
    node_labels = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8"}
    world.cluster.put(NODE, {"metadata": {"name": "a", "labels": node_labels}, "status": {}})
    world.cluster.put(MODEL_SERVE, {"metadata": {"name": "m", "namespace": "ml"}, "spec": {}})
    world.cluster.listener = None  # the watch was away
    world.cluster.remove(NODE, "", "a")
    heard, _ = await world.gatherer.relist()
    assert heard.supply
    assert world.gatherer.concerned() == {Key("ml", "m")}
    observed = await world.gatherer.observe(Key("ml", "m"))
    assert observed.supply.pools == ()


async def test_the_endpoint_serves_metrics_and_liveness() -> None:
    healthy = True
    async with (
        endpoint.serve(host="127.0.0.1", port=0, alive=lambda: healthy) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        async with session.get("/metrics") as response:
            assert "modelserve_operator_queue_depth" in await response.text()
        resource_metrics.show("ml", "shown", {}, desired=1)
        async with session.get("/metrics", params={"name[]": "modelserve_replicas"}) as response:
            text = await response.text()
            assert 'modelserve_replicas{name="shown",namespace="ml",state="desired"} 1.0' in text
            assert "modelserve_operator_queue_depth" not in text
        resource_metrics.forget("ml", "shown")
        async with session.get("/healthz") as response:
            assert response.status == 200
        healthy = False
        async with session.get("/healthz") as response:
            assert response.status == 503
