"""Children that somebody edits: our own fields are put right, other things stay, no edit or heal ends a ready pod."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    MODEL_SERVE,
    POD,
    SERVICE,
    ResourceKind,
)
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.writing import drift

Body = dict[str, Any]


def _worker(deployment: Body) -> Body:
    worker: Body = deployment["spec"]["template"]["spec"]["containers"][0]
    return worker


def _edit(world, kind: ResourceKind, change: Callable[[Body], None]) -> None:
    (body,) = world.cluster.of(kind)
    world.cluster.change(kind, body["metadata"]["name"], change)


def _selector(key: str) -> Callable[[Body], None]:
    return lambda body: body["spec"]["selector"].update({key: "x"})


OURS: list[tuple[ResourceKind, Callable[[Body], None], str]] = [
    (SERVICE, _selector("app"), "spec.selector (app)"),
    (SERVICE, lambda body: body["spec"]["selector"].pop(labels.PLAN_HASH), "spec.selector"),
    (SERVICE, lambda body: body["spec"]["ports"].append({"name": "debug", "port": 81}), "spec.ports (debug)"),
    (SERVICE, lambda body: body["spec"]["ports"][0].update(targetPort=9), "spec.ports"),
    (SERVICE, lambda body: body["spec"].update(type="NodePort"), "spec.type"),
    (DEPLOYMENT, lambda body: body["spec"].update(paused=True), "spec.paused"),
    (
        DEPLOYMENT,
        lambda body: body["spec"]["template"]["spec"].update(nodeSelector={"nope": "x"}),
        "template.spec.nodeSelector (nope)",
    ),
    (DEPLOYMENT, lambda body: body["spec"]["template"]["spec"].update(hostNetwork=True), "template.spec.hostNetwork"),
    (DEPLOYMENT, lambda body: _worker(body).update(image="other"), "containers.image"),
    (DEPLOYMENT, lambda body: _worker(body)["command"].append("--verbose"), "containers.command"),
    (DEPLOYMENT, lambda body: _worker(body).update(args=["--verbose"]), "containers.args"),
    (DEPLOYMENT, lambda body: _worker(body)["env"].append({"name": "DEBUG", "value": "1"}), "containers.env (DEBUG)"),
    (DEPLOYMENT, lambda body: _worker(body)["env"].pop(), "containers.env"),
    (DEPLOYMENT, lambda body: _worker(body).update(envFrom=[{"secretRef": {"name": "s"}}]), "containers.envFrom"),
    (
        DEPLOYMENT,
        lambda body: _worker(body)["resources"]["limits"].update(x="1"),
        "containers.resources (limits.x)",
    ),
    (DEPLOYMENT, lambda body: _worker(body)["resources"]["requests"].update(cpu="9"), "containers.resources"),
]


@pytest.mark.parametrize(("kind", "change", "field"), OURS, ids=[field for _, _, field in OURS])
def test_a_field_that_is_ours_alone_is_put_right(
    ready_world, caplog: pytest.LogCaptureFixture, kind: ResourceKind, change: Callable[[Body], None], field: str
) -> None:
    (before,) = copy.deepcopy(ready_world.cluster.of(kind))
    pods = ready_world.cluster.of(POD)
    ready_world.rest()
    _edit(ready_world, kind, change)
    ready_world.settle()
    (after,) = ready_world.cluster.of(kind)
    assert after["spec"] == before["spec"]
    assert [write for write in ready_world.rest() if write[1] == kind.kind] == [
        ("patch", kind.kind, after["metadata"]["name"])
    ]
    assert field in caplog.text
    assert ready_world.cluster.of(POD) == pods
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def _add_sidecar(body: Body) -> None:
    pod = body["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "proxy", "image": "proxy", "env": [{"name": "A", "value": "1"}]})
    pod["volumes"].append({"name": "certificates", "emptyDir": {}})
    body["spec"]["template"]["metadata"]["labels"]["injected"] = "true"


def _restart(body: Body) -> None:
    annotations = body["spec"]["template"]["metadata"].setdefault("annotations", {})
    annotations["kubectl.kubernetes.io/restartedAt"] = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (DEPLOYMENT, _add_sidecar),
        (DEPLOYMENT, _restart),
        (DEPLOYMENT, lambda body: body["metadata"].setdefault("annotations", {}).update(team="a")),
        (SERVICE, lambda body: body["metadata"].setdefault("annotations", {}).update(team="a")),
        (SERVICE, lambda body: body["spec"].update(clusterIP="10.0.0.9", sessionAffinity="None")),
        (SERVICE, lambda body: body["spec"]["ports"][0].update(nodePort=30000)),
        (DEPLOYMENT, lambda body: _worker(body).update(terminationMessagePath="/dev/termination-log")),
    ],
)
def test_what_others_add_elsewhere_stays(ready_world, kind: ResourceKind, change: Callable[[Body], None]) -> None:
    ready_world.rest()
    _edit(ready_world, kind, change)
    ready_world.settle()
    assert ready_world.rest() == []


def test_a_sidecar_stays_when_the_worker_beside_it_is_put_right(ready_world) -> None:
    _edit(ready_world, DEPLOYMENT, _add_sidecar)
    _edit(ready_world, DEPLOYMENT, lambda body: body["spec"]["template"]["spec"]["containers"][1].update(args=["x"]))
    ready_world.settle()
    (body,) = ready_world.cluster.of(DEPLOYMENT)
    proxy, worker = body["spec"]["template"]["spec"]["containers"]
    assert (proxy["name"], worker["name"]) == ("proxy", "worker")
    assert "args" not in worker


def test_replacing_pods_ends_none_before_another_is_ready(ready_world) -> None:
    (body,) = ready_world.cluster.of(DEPLOYMENT)
    assert body["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def _debug(body: Body) -> None:
    _worker(body)["env"].append({"name": "DEBUG", "value": "1"})


def test_three_heals_of_a_template_within_an_hour_and_then_it_says_so(ready_world) -> None:
    pods = ready_world.cluster.of(POD)
    for _ in range(drift.MOST_HEALS):
        _edit(ready_world, DEPLOYMENT, _debug)
        ready_world.settle()
        assert ready_world.condition("Ready") == ("True", "RolledOut")
        ready_world.pass_time(10)
    ready_world.rest()
    _edit(ready_world, DEPLOYMENT, _debug)
    ready_world.settle()
    assert [write for write in ready_world.rest() if write[1] == "Deployment"] == []
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    assert ready_world.condition("Ready") == ("False", "DriftContested")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert "env (DEBUG)" in ready_world.message("Stalled")
    assert ready_world.cluster.of(POD) == pods
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.rest()[2:] == [], "the status and one event"
    ready_world.pass_time(3600)
    assert ready_world.condition("Ready") == ("True", "RolledOut"), "put right again once an hour has passed"


def test_who_asks_has_a_contested_template_put_right_at_once(ready_world) -> None:
    for _ in range(drift.MOST_HEALS + 1):
        _edit(ready_world, DEPLOYMENT, _debug)
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    ready_world.ask_for_a_retry("1")
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert "DEBUG" not in str(ready_world.cluster.of(DEPLOYMENT))


def test_a_contested_service_goes_on_being_put_right_and_says_so(ready_world) -> None:
    """Giving up on it would protect nobody: no pod ends, and clients pay."""
    for _ in range(drift.MOST_HEALS + 1):
        _edit(ready_world, SERVICE, _selector("app"))
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    assert ready_world.condition("Available") == ("False", "NotServing"), "the Service selects nothing now"
    assert "spec.selector (app)" in ready_world.message("Stalled")
    assert "has no endpoint of theirs" in ready_world.message("Available")
    assert ready_world.deployments() == {ready_world.served_hash(): 1}
    for wait in (10, 20, 40, 80, 120, 120):
        ready_world.pass_time(wait - 1)
        assert ready_world.condition("Available") == ("False", "NotServing")
        ready_world.pass_time(2)
        assert ready_world.condition("Available") == ("True", "Serving")
        assert ready_world.condition("Stalled") == ("True", "DriftContested"), "the other may come back"
        _edit(ready_world, SERVICE, _selector("app"))
        ready_world.settle()
    ready_world.pass_time(121)
    ready_world.rest()
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.rest() == []
    ready_world.pass_time(241)
    assert ready_world.condition("Stalled") is None
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_surge_pod_that_somebody_elses_edit_made_is_not_ready(ready_world) -> None:
    healthy = ready_world.cluster.of(POD)
    ready_world.cluster._make_pod(ready_world.cluster.of(DEPLOYMENT)[0], {})
    ready_world.pending, run = ready_world.gatherer.known_keys(), ready_world.cluster.run_controllers
    ready_world.cluster.run_controllers = lambda: None
    ready_world.settle()
    assert ready_world.condition("Ready") == ("False", "RollingOut")
    assert ready_world.condition("Available") == ("True", "Serving")
    ready_world.cluster.run_controllers = run
    ready_world.cluster.run_controllers()
    ready_world.settle()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert ready_world.cluster.of(POD) == healthy


def test_a_field_of_somebody_else_that_excludes_ours_is_drift_and_not_the_spec(ready_world) -> None:
    """The API server refuses both bounds of a disruption budget together, whoever set the other one."""

    def pinned(body: Body) -> None:
        body["spec"] = {key: value for key, value in body["spec"].items() if key != "maxUnavailable"}
        body["spec"]["minAvailable"] = 5

    (before,) = copy.deepcopy(ready_world.cluster.of(DISRUPTION_BUDGET))
    _edit(ready_world, DISRUPTION_BUDGET, pinned)
    ready_world.settle()
    (after,) = ready_world.cluster.of(DISRUPTION_BUDGET)
    assert after["spec"] == before["spec"]
    assert ready_world.condition("Accepted") == ("True", "Valid")
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_what_does_not_go_together_is_not_blamed_on_the_spec(ready_world) -> None:
    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("apply", DEPLOYMENT):
            raise KubeError(422, "may not specify more than 1 volume type")

    ready_world.cluster.asked = refuse
    _edit(ready_world, DEPLOYMENT, lambda body: body["spec"]["template"]["spec"]["volumes"][0].pop("emptyDir"))
    ready_world.settle()
    assert ready_world.condition("Accepted") == ("True", "Valid")
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    assert "more than 1 volume type" in ready_world.message("Stalled")
    assert ready_world.condition("Available") == ("True", "Serving")


def test_the_contest_ends_when_the_other_gives_way(ready_world) -> None:
    for _ in range(drift.MOST_HEALS + 1):
        _edit(ready_world, SERVICE, _selector("app"))
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    _edit(ready_world, SERVICE, lambda body: body["spec"]["selector"].pop("app"))
    ready_world.settle()
    assert ready_world.condition("Stalled") is None
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_contest_over_one_child_stops_no_other_write(ready_world) -> None:
    for _ in range(drift.MOST_HEALS + 1):
        _edit(ready_world, SERVICE, _selector("app"))
        ready_world.settle()
    ready_world.edit(replicas=2)
    assert list(ready_world.deployments().values()) == [2]
    ready_world.edit(context={"maxModelLen": 1024})
    for _ in range(3):
        ready_world.make_ready()
    assert "app" not in ready_world.cluster.of(SERVICE)[0]["spec"]["selector"], "a change of our own goes through"
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_a_rival_that_takes_our_annotation_away_is_contested_too(ready_world) -> None:
    for _ in range(drift.MOST_HEALS + 1):
        _edit(ready_world, SERVICE, lambda body: body["metadata"]["annotations"].pop(labels.APPLIED_HASH, None))
        ready_world.settle()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")


@pytest.mark.parametrize(("writes", "healed"), [(1, True), (4, True), (5, False)])
async def test_an_object_that_changes_under_the_patch_is_read_anew_and_costs_no_heal(
    ready_world, writes: int, healed: bool
) -> None:
    """The Deployment's own controller writes to it as soon as somebody edits it."""
    (key,), left = ready_world.due, writes

    def overtake(request: Any) -> None:
        nonlocal left
        if request.verb == "json_patch" and left:
            left -= 1
            _edit(ready_world, SERVICE, lambda body: body["metadata"]["annotations"].update(writes=str(left)))

    ready_world.cluster.asked = overtake
    ready_world.cluster.listener = None  # the watch lags
    _edit(ready_world, SERVICE, _selector("app"))
    ready_world.gatherer.note(SERVICE, copy.deepcopy(ready_world.cluster.of(SERVICE)[0]), deleted=False)
    if not healed:
        with pytest.raises(KubeError, match="has changed meanwhile") as raised:
            await ready_world.reconciler.reconcile(key)
        assert raised.value.status == 409
        await ready_world.reconciler.reconcile(key)
    else:
        await ready_world.reconciler.reconcile(key)
    (body,) = ready_world.cluster.of(SERVICE)
    assert "app" not in body["spec"]["selector"]
    assert body["metadata"]["annotations"]["writes"] == "0"
    uid = body["metadata"]["uid"]
    assert len(ready_world.reconciler._applier._heals._known[uid].times) == 1


def test_ready_workers_without_endpoints_are_not_ready_to_serve(ready_world) -> None:
    ready_world.cluster._make_endpoints = lambda service: None  # the endpoints controller is away
    ready_world.edit(replicas=2)
    ready_world.make_ready()
    assert ready_world.condition("WorkersReady") == ("True", "AllReady")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert ready_world.condition("Ready") == ("False", "RollingOut")
    assert "1 of 2 workers are behind Service tiny" in ready_world.message("Ready")


def test_the_memory_of_a_deleted_model_serve_is_freed(ready_world) -> None:
    assert ready_world.reconciler._applier._last
    ready_world.cluster.remove(MODEL_SERVE, "ml", "tiny")
    ready_world.settle()
    assert ready_world.reconciler._applier._last == {}
    assert ready_world.cluster.of(CONFIG_MAP) == []
