"""What an earlier release left in a cluster: that of 0.1.0 is imported once, and what cannot be is said; that of every
release since is read as it is. No pod ends.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CLAIM,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    MODEL_SERVE,
    OPTIONAL,
    POD,
    WATCHED,
)

RECORDED = Path(__file__).parents[1] / "releases" / "0.1.0"
SCENES = sorted(path.stem for path in RECORDED.glob("*.json") if path.stem != "defaults")
KINDS = {kind.kind: kind for kind in (*WATCHED, *OPTIONAL, CLAIM)}
SINCE = sorted(path for path in RECORDED.parent.glob("*/*.json") if path.parent != RECORDED and path.stem != "defaults")
BACK_AGAIN = {"ready_on_the_cpu": "tiny", "measured_on_gpus": "big"}  # scenes that are Ready


def _load(
    world, scene: str, change: Callable[[dict[str, Any]], None] | None = None, *, recorded_in: Path = RECORDED
) -> str:
    """Put the recorded objects into the cluster, while no operator runs; returns the name of the ModelServe."""
    cluster = world.cluster
    cluster.listener = None
    cluster.objects.clear()
    cluster._numbers = itertools.count(1_000_000)
    recorded = json.loads((recorded_in / f"{scene}.json").read_text())
    cluster.worker_plans = recorded["workers"]
    for body in recorded["objects"]:
        if change is not None:
            change(body)
        metadata = body["metadata"]
        kind = KINDS[body["kind"]]
        cluster.objects[kind, metadata.get("namespace", ""), metadata["name"]] = body
    (name,) = (body["metadata"]["name"] for body in cluster.of(MODEL_SERVE))
    return str(name)


def _start(world) -> list[tuple[str, str, str]]:
    """This release's operator starts; returns what it wrote."""
    world.rest()
    world.restart_operator()
    world.settle()
    return [write for write in world.rest() if write[0] != "create"]


def _all(world, kind) -> dict[str, dict[str, Any]]:
    """By name; what the operator keeps for itself is of another namespace."""
    bodies = [body for body in world.cluster.of(kind) if body["metadata"]["namespace"] == "ml"]
    return {body["metadata"]["name"]: copy.deepcopy(body) for body in bodies}


def _roll(world) -> None:
    for _ in range(8):
        world.make_ready()


def _template_names(world) -> set[str]:
    return {name for name, body in _all(world, CONFIG_MAP).items() if "template.json" in body.get("data", {})}


def _same_conditions(world, name: str, status: dict[str, Any]) -> None:
    """What earlier releases said still holds; they did not say that the nodes of what is committed are gone."""
    gone = world.condition("PoolsGone", name) is not None
    for each in status["conditions"]:
        if each["type"] in ("Ready", "Available", "Accepted", "Planned", "Stalled"):
            now = world.condition(each["type"], name)
            assert now == (each["status"], each["reason"]) or (gone and now == (each["status"], "PoolsGone"))
    assert [event["reason"] for event in world.cluster.events] == (["PoolsGone"] if gone else [])


@pytest.mark.parametrize("scene", SCENES)
def test_everything_that_runs_is_imported_and_no_pod_ends(world, scene: str) -> None:
    name = _load(world, scene)
    before = {kind: _all(world, kind) for kind in (POD, DEPLOYMENT, CONFIG_MAP)}
    status = copy.deepcopy(world.status(name))
    writes = _start(world)
    assert {kind: _all(world, kind) for kind in before} == before
    assert set(_all(world, CONTROLLER_REVISION)) == set(before[DEPLOYMENT])
    kinds = {kind for _, kind, written in writes if written != "modelserve-calibration"}
    assert kinds <= {"ControllerRevision", "ModelServe"}
    now = world.status(name)
    for field in ("revision", "url", "readyReplicas", "maxModelLen", "calibration"):
        assert now.get(field) == status.get(field)
    assert {**now["plan"], "candidates": []} == {**status["plan"], "candidates": []}
    _same_conditions(world, name, status)
    assert _start(world) == [], "once"


@pytest.mark.parametrize("scene", SCENES)
def test_an_imported_revision_is_what_its_config_map_was(world, scene: str) -> None:
    _load(world, scene)
    _start(world)
    for name, body in _all(world, CONTROLLER_REVISION).items():
        old = world.cluster.objects[CONFIG_MAP, "ml", name]["data"]
        data = body["data"]
        assert data["template"] == json.loads(old["template.json"])
        plan = json.loads(old["plan.json"])
        assert {**data["plan"], "candidates": []} == {**plan, "candidates": []}
        assert data["importedFrom"] == data["worker"]["release"] == data["renderer"]["release"] == "0.1.0"


def test_the_approval_that_was_given_last_still_holds(world) -> None:
    """Its ConfigMap is older than the other's: an annotation made it the last one."""
    name = _load(world, "approved_again")
    wanted = world.status(name)["revision"]
    _start(world)
    numbers = {each: body["revision"] for each, body in _all(world, CONTROLLER_REVISION).items()}
    assert max(numbers, key=lambda each: numbers[each]) == wanted
    assert world.status(name)["revision"] == wanted


@pytest.mark.parametrize("scene", sorted(BACK_AGAIN))
def test_an_imported_revision_is_one_to_go_back_to(world, scene: str) -> None:
    name = _load(world, scene)
    _start(world)
    (first,) = world.deployments()
    spec = copy.deepcopy(world.cluster.objects[MODEL_SERVE, "ml", name]["spec"])
    world.edit(name, context={"maxModelLen": 1024})
    _roll(world)
    assert first not in world.deployments()
    assert _template_names(world) == set(), "nothing of the old format is left once nothing runs from it"
    world.edit(name, context=spec.get("context"))
    _roll(world)
    assert list(world.deployments()) == [first]
    assert world.condition("Ready", name) == ("True", "RolledOut")
    assert _template_names(world) == set(), "or written"


def test_a_label_after_the_upgrade_changes_neither_plan_nor_image(world) -> None:
    name = _load(world, "measured_on_gpus")
    world.settings = world.settings.model_copy(update={"worker_image": "worker:newer"})
    _start(world)
    before = world.shown_plan(name)
    world.edit(name, pod={"labels": {"team": "ads"}})
    _roll(world)
    (new,) = world.deployments()
    template = world.deployment(new)["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "ads"
    assert template["spec"]["containers"][0]["image"] == "worker:test"
    assert world.shown_plan(name) == before


def _unreadable_plan(body: dict[str, Any]) -> None:
    if "plan.json" in body.get("data", {}):
        body["data"]["plan.json"] = "{"


def _other_template(body: dict[str, Any]) -> None:
    if body["kind"] == "Deployment":
        body["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"


def _no_status(body: dict[str, Any]) -> None:
    body.pop("status", None) if body["kind"] == "ModelServe" else None


@pytest.mark.parametrize("change", [_unreadable_plan, _other_template, _no_status])
def test_what_cannot_be_imported_is_said_and_left_as_it_is(world, change) -> None:
    name = _load(world, "ready_on_the_cpu", change)
    world.cluster.run_controllers()
    before = {key: copy.deepcopy(body) for key, body in world.cluster.objects.items() if key[0] is not MODEL_SERVE}
    _start(world)
    after = {key: body for key, body in world.cluster.objects.items() if key[0] is not MODEL_SERVE}
    assert after == before
    assert world.condition("Stalled", name) == ("True", "RevisionUnreadable")
    (deployment,) = _all(world, DEPLOYMENT)
    assert f"ConfigMap {deployment}" in world.message("Stalled", name)
    assert "RevisionUnreadable" in [event["reason"] for event in world.cluster.events]
    assert world.condition("Available", name) == ("True", "Serving")


def test_what_is_put_right_is_imported_after_all(world) -> None:
    name = _load(world, "ready_on_the_cpu", _other_template)
    (deployment,) = _all(world, DEPLOYMENT)
    recorded = json.loads(world.cluster.objects[CONFIG_MAP, "ml", deployment]["data"]["template.json"])
    _start(world)
    assert world.condition("Stalled", name) == ("True", "RevisionUnreadable")
    world.cluster.change(DEPLOYMENT, deployment, lambda body: body["spec"].update(template=recorded))
    world.settle()
    assert list(_all(world, CONTROLLER_REVISION)) == [deployment]
    assert world.condition("Ready", name) == ("True", "RolledOut")


def test_under_a_refused_spec_the_import_waits_until_it_can_be_read(world) -> None:
    """It could not be told whether the revision is of the spec, and would be planned anew."""
    name = _load(world, "ready_on_the_cpu")
    spec = world.cluster.objects[MODEL_SERVE, "ml", name]["spec"]
    valid = copy.deepcopy(spec)
    spec["context"] = {"maxModelLen": 100, "minModelLen": 200}
    pods = _all(world, POD)
    _start(world)
    assert world.condition("Accepted", name) == ("False", "InvalidSpec")
    assert _all(world, CONTROLLER_REVISION) == {}
    world.edit(name, context=valid["context"])
    (deployment,) = _all(world, DEPLOYMENT)
    assert list(_all(world, CONTROLLER_REVISION)) == [deployment]
    assert _all(world, POD) == pods
    assert world.condition("Ready", name) == ("True", "RolledOut")


@pytest.mark.parametrize("deployed", [False, True])
def test_a_forged_config_map_is_not_imported_as_what_is_wanted(world, deployed: bool) -> None:
    """The forger may write ConfigMaps and, where `deployed`, Deployments; he may not write the status."""
    name = _load(world, "ready_on_the_cpu")
    (wanted,) = _all(world, DEPLOYMENT)
    forged = {}
    for kind in (CONFIG_MAP, *([DEPLOYMENT] if deployed else [])):
        body = copy.deepcopy(world.cluster.objects[kind, "ml", wanted])
        body["metadata"] |= {"name": "tiny-aaaaaaaaaa", "uid": f"forged-{kind.kind}"}
        body["metadata"]["labels"][labels.PLAN_HASH] = "aaaaaaaaaa"
        body["metadata"].setdefault("annotations", {})[f"{labels.GROUP}/committed-at"] = "2099-01-01T00:00:00Z"
        forged[kind] = world.cluster.objects[kind, "ml", "tiny-aaaaaaaaaa"] = body
    if deployed:
        forged[DEPLOYMENT]["spec"]["replicas"] = 0
    pods = _all(world, POD)
    _start(world)
    assert world.status(name)["revision"] == wanted
    assert world.served_hash() == wanted.removeprefix("tiny-")
    assert _all(world, POD) == pods
    if not deployed:
        assert "ConfigMap tiny-aaaaaaaaaa" in world.message("Planned", name)
        assert "RevisionRefused" in [event["reason"] for event in world.cluster.events]
        assert world.cluster.objects[CONFIG_MAP, "ml", "tiny-aaaaaaaaaa"] == forged[CONFIG_MAP]


@pytest.mark.parametrize("path", SINCE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_a_release_since_left_is_read_as_it_is(world, path: Path) -> None:
    name = _load(world, path.stem, recorded_in=path.parent)
    before = {kind: _all(world, kind) for kind in (POD, DEPLOYMENT, CONTROLLER_REVISION, CONFIG_MAP)}
    status = copy.deepcopy(world.status(name))
    assert len(before[CONTROLLER_REVISION]) == len(before[DEPLOYMENT]) > 0
    _start(world)
    assert {kind: _all(world, kind) for kind in before} == before, "whatever this release would plan"
    now = world.status(name)
    for field in ("revision", "modelCommit", "url", "readyReplicas", "maxModelLen"):
        assert now.get(field) == status.get(field)
    _same_conditions(world, name, status)
    assert _start(world) == [], "written once at most"
