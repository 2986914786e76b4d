"""A revision is an object: what it holds, how one goes back to it, what an edit of pods leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, MODEL_SERVE, POD
from modelserve_operator.revisions.revision import content_digest

H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 81_559, "gpus": 8}
BIG = {"model": {"uri": "hf://google/gemma-4-31B-it"}}


def _revisions(world, name: str = "tiny") -> dict[str, dict[str, Any]]:
    """ControllerRevisions by hash."""
    bodies = world.cluster.of(CONTROLLER_REVISION)
    return {body["metadata"]["name"].removeprefix(f"{name}-"): body for body in bodies}


def _uids(world) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.cluster.of(POD)}


def _everything(world) -> dict[Any, Any]:
    """All objects but the ModelServe, whose status is written."""
    return {key: copy.deepcopy(body) for key, body in world.cluster.objects.items() if key[0] is not MODEL_SERVE}


def _events(world, reason: str) -> list[str]:
    return [event["message"] for event in world.cluster.events if event["reason"] == reason]


@pytest.fixture
def big(world):
    """A published model, Ready on H200."""
    world.add_node("a", **H200)
    world.create({**BIG, "pod": {"labels": {"team": "a"}}}, name="big")
    world.make_ready()
    return world


def test_a_revision_holds_all_that_runs(big) -> None:
    ((name, body),) = _revisions(big, "big").items()
    data = body["data"]
    assert body["revision"] == 1
    assert data["schemaVersion"] == 1
    assert data["template"] == big.deployment(name)["spec"]["template"]
    assert data["inputs"]["spec"] == {**BIG, "pod": {"labels": {"team": "a"}}}
    assert data["worker"] == {"image": "worker:test", "release": data["renderer"]["release"]}
    assert data["generation"] == 1
    assert [each["verdict"] for each in data["plan"]["candidates"]] == ["Chosen"]
    assert data["digest"] == content_digest(data)
    assert yaml.safe_load(big.cluster.objects[CONFIG_MAP, "ml", f"big-{name}"]["data"]["engine.yaml"]) == data["engine"]
    assert list(big.cluster.objects[CONFIG_MAP, "ml", f"big-{name}"]["data"]) == ["engine.yaml"]


def test_who_approved_is_the_field_manager(world) -> None:
    world.add_node("a", **H200)
    written = [
        {"manager": "argocd-controller", "time": "2026-01-02T00:00:00Z", "fieldsV1": {"f:spec": {"f:model": {}}}},
        {
            "manager": "modelserve",
            "time": "2026-01-03T00:00:00Z",
            "subresource": "status",
            "fieldsV1": {"f:status": {}},
        },
        {"manager": "labeller", "time": "2026-01-04T00:00:00Z", "fieldsV1": {"f:metadata": {"f:labels": {}}}},
    ]
    world.create(BIG, name="big", managedFields=written)
    (body,) = _revisions(world, "big").values()
    assert body["data"]["approvedBy"] == "argocd-controller"


def test_an_edit_of_pods_alone_takes_the_same_plan_and_worker(big) -> None:
    """Nodes have changed, and the operator's image: neither comes in by a label."""
    before = big.shown_plan("big")
    big.settings = big.settings.model_copy(update={"worker_image": "worker:newer"})
    big.restart_operator()
    big.add_node("a", **H100)
    assert big.status("big")["proposedPlan"]["accelerator"] == H100["product"]
    big.edit("big", pod={"labels": {"team": "b"}})
    big.add_node("a", **H200)
    big.make_ready()
    assert big.shown_plan("big") == before
    (new,) = big.deployments()
    template = big.deployment(new)["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "b"
    assert template["spec"]["containers"][0]["image"] == "worker:test"
    assert big.condition("Ready", "big") == ("True", "RolledOut")
    big.edit("big", pod={"labels": {"team": "b"}}, context={"maxModelLen": 4096})
    big.make_ready()
    (new,) = big.deployments()
    assert big.deployment(new)["spec"]["template"]["spec"]["containers"][0]["image"] == "worker:newer"


def test_an_edit_of_pods_needs_no_plan_that_fits_now(big) -> None:
    big.cluster.remove(next(kind for kind, *_ in big.cluster.objects if kind.kind == "Node"), "", "a")
    big.settle()
    before = big.shown_plan("big")
    big.edit("big", pod={"labels": {"team": "b"}})
    assert big.condition("Planned", "big") == ("True", "PlanCommitted")
    assert big.shown_plan("big") == before


def test_in_mode_manual_an_edit_of_pods_waits_with_the_same_plan(big) -> None:
    before = big.status("big")["plan"]
    big.edit("big", plan={"mode": "Manual"})
    big.add_node("a", **H100)
    big.edit("big", pod={"annotations": {"example.com/a": "b"}})
    assert big.condition("Planned", "big") == ("False", "WaitingForApproval")
    assert big.status("big")["proposedPlan"]["hash"] == before["hash"]
    assert big.status("big")["proposedPlan"]["accelerator"] == before["accelerator"]


def test_going_back_in_git_runs_the_very_revision_again(big) -> None:
    """A -> B complete -> A: A's hash, plan and image, though nodes and the release's image have changed since."""
    (first,) = big.deployments()
    kept = copy.deepcopy(_revisions(big, "big")[first]["data"])
    big.edit("big", context={"maxModelLen": 4096})
    big.make_ready()
    (second,) = big.deployments()
    assert second != first
    assert big.condition("Ready", "big") == ("True", "RolledOut")
    big.settings = big.settings.model_copy(update={"worker_image": "worker:newer"})
    big.restart_operator()
    big.edit("big", context=None)
    big.make_ready()
    assert big.deployments() == {first: 1}
    assert big.condition("Ready", "big") == ("True", "RolledOut")
    assert big.deployment(first)["spec"]["template"] == kept["template"]
    revisions = _revisions(big, "big")
    assert revisions[first]["data"] == kept, "data of a revision never changes"
    assert revisions[first]["revision"] > revisions[second]["revision"], "it was committed last"
    big.rest()
    big.restart_operator()
    big.settle()
    assert big.rest() == []


def test_a_pin_goes_back_and_nothing_is_planned_past_it(big) -> None:
    (first,) = big.deployments()
    big.edit("big", context={"maxModelLen": 4096})
    big.make_ready()
    (second,) = big.deployments()
    big.edit("big", plan={"revision": f"big-{first}"})
    big.make_ready()
    assert big.deployments() == {first: 1}
    assert big.condition("Ready", "big") == ("True", "RolledOut")
    assert big.message("Planned", "big").startswith(f"Pinned by spec.plan.revision to big-{first}")
    big.edit("big", context={"maxModelLen": 8192}, pod={"labels": {"team": "z"}})
    big.add_node("b", **H100)
    assert big.deployments() == {first: 1}, "in mode Automatic too"
    big.edit("big", plan=None, context={"maxModelLen": 4096}, pod={"labels": {"team": "a"}})
    big.make_ready()
    assert big.deployments() == {second: 1}, "without the pin the spec decides, and it was committed before"


def test_a_pin_to_nothing_says_what_there_is_and_leaves_what_runs(big) -> None:
    before = _everything(big)
    big.edit("big", plan={"revision": "big-0123456789"}, replicas=3)
    assert big.condition("Planned", "big") == ("False", "RevisionUnknown")
    assert big.condition("Stalled", "big") == ("True", "RevisionUnknown")
    assert f"big-{big.served_hash('big')}" in big.message("Stalled", "big")
    assert big.condition("Available", "big") == ("True", "Serving")
    assert _everything(big) == before
    big.edit("big", plan=None, replicas=1)
    assert big.condition("Ready", "big") == ("True", "RolledOut")


@pytest.mark.parametrize("limit", [0, 2])
def test_history_is_kept_to_the_limit_beside_what_runs(ready_world, limit: int) -> None:
    ready_world.edit(revisionHistoryLimit=limit)
    committed = [ready_world.served_hash()]
    for length in (1024, 1000, 900, 800):
        ready_world.edit(context={"maxModelLen": length})
        ready_world.make_ready()
        committed.append(ready_world.served_hash())
    assert set(_revisions(ready_world)) == set(committed[-1 - limit :])
    settings = [body for body in ready_world.cluster.of(CONFIG_MAP) if "engine.yaml" in body["data"]]
    assert [body["metadata"]["name"] for body in settings] == [f"tiny-{committed[-1]}"]
    ready_world.edit(context={"maxModelLen": 2048})
    ready_world.make_ready()
    assert len(_revisions(ready_world)) == limit + 1


# --- what others write -------------------------------------------------------------------------------------------


def _forged_config_map(world, *, owner: bool) -> dict[str, Any]:
    """What made release 0.1.0 run anything: its labels, a template, and a time that no other is later than."""
    (real,) = world.cluster.of(DEPLOYMENT)
    template = copy.deepcopy(real["spec"]["template"])
    template["spec"]["containers"][0]["image"] = "evil:1"
    metadata = {
        "name": "tiny-aaaaaaaaaa",
        "namespace": "ml",
        "labels": labels.child(
            "tiny", labels.REVISION, **{labels.PLAN_HASH: "aaaaaaaaaa", f"{labels.GROUP}/spec-hash": "x"}
        ),
        "annotations": {f"{labels.GROUP}/committed-at": "2099-01-01T00:00:00Z"},
    }
    if owner:
        metadata["ownerReferences"] = real["metadata"]["ownerReferences"]
    (revision,) = world.cluster.of(CONTROLLER_REVISION)
    data = {
        "engine.yaml": yaml.safe_dump(revision["data"]["engine"]),
        "plan.json": yaml.safe_dump(revision["data"]["plan"]),
        "template.json": yaml.safe_dump(template),
        "revision.json": '{"weightBytes": 1}',
    }
    return {"metadata": metadata, "immutable": True, "data": data}


@pytest.mark.parametrize("owner", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_forged_config_map_is_refused_by_name_and_runs_nothing(ready_world, owner: bool, restarted: bool) -> None:
    ready_world.cluster.put(CONFIG_MAP, _forged_config_map(ready_world, owner=owner))
    before = _everything(ready_world)
    if restarted:
        ready_world.restart_operator()
    ready_world.settle()
    assert _everything(ready_world) == before
    (event,) = _events(ready_world, "RevisionRefused")
    assert "ConfigMap tiny-aaaaaaaaaa" in event
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    ready_world.edit(replicas=2)
    assert len(_events(ready_world, "RevisionRefused")) == 1, "it is told once"
    assert len(ready_world.deployments()) == 1


@pytest.mark.parametrize("owners", [[], [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "other"}]])
def test_a_revision_that_the_modelserve_does_not_own_is_refused(ready_world, owners: list[dict[str, str]]) -> None:
    (real,) = ready_world.cluster.of(CONTROLLER_REVISION)
    forged = copy.deepcopy(real)
    forged["data"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    forged["data"]["name"] = "tiny-aaaaaaaaaa"
    forged["data"]["digest"] = content_digest(forged["data"])
    hashed = {**real["metadata"]["labels"], labels.PLAN_HASH: "aaaaaaaaaa"}
    metadata = {"name": "tiny-aaaaaaaaaa", "namespace": "ml", "labels": hashed, "ownerReferences": owners}
    ready_world.cluster.put(CONTROLLER_REVISION, {**forged, "metadata": metadata, "revision": 99})
    before = _everything(ready_world)
    ready_world.settle()
    assert _everything(ready_world) == before
    (event,) = _events(ready_world, "RevisionRefused")
    assert "ControllerRevision tiny-aaaaaaaaaa" in event
    ready_world.edit(plan={"revision": "tiny-aaaaaaaaaa"})
    assert ready_world.condition("Planned") == ("False", "RevisionUnknown"), "nor can it be pinned"
    assert len(ready_world.deployments()) == 1


def test_settings_that_somebody_replaces_are_rendered_from_the_revision_again(ready_world) -> None:
    name = f"tiny-{ready_world.served_hash()}"
    real = copy.deepcopy(ready_world.cluster.objects[CONFIG_MAP, "ml", name])
    pods = _uids(ready_world)

    def replace() -> None:
        ready_world.cluster.remove(CONFIG_MAP, "ml", name)
        ready_world.cluster.put(CONFIG_MAP, {**real, "data": {"engine.yaml": "model: /tmp/mine\n"}})
        ready_world.settle()

    for _ in range(3):
        replace()
        assert ready_world.cluster.objects[CONFIG_MAP, "ml", name]["data"] == real["data"]
    replace()
    assert ready_world.condition("Stalled") == ("True", "DriftContested")
    assert _uids(ready_world) == pods
    ready_world.pass_time(60)
    assert ready_world.cluster.objects[CONFIG_MAP, "ml", name]["data"] == real["data"], "it goes on, more slowly"
    ready_world.pass_time(4000)
    assert ready_world.condition("Ready") == ("True", "RolledOut")


# --- what cannot be read -----------------------------------------------------------------------------------------


def _put_anew(world, name: str, change) -> None:
    """Data of a ControllerRevision is immutable: somebody restores a backup, or damages etcd."""
    body = copy.deepcopy(world.cluster.objects[CONTROLLER_REVISION, "ml", name])
    change(body)
    world.cluster.remove(CONTROLLER_REVISION, "ml", name)
    world.cluster.put(CONTROLLER_REVISION, body)
    world.settle()


def _later(body: dict[str, Any]) -> None:
    body["data"]["schemaVersion"] = 99
    body["data"]["digest"] = content_digest(body["data"])


def _damage(body: dict[str, Any]) -> None:
    body["data"]["template"]["spec"]["containers"][0]["image"] = "evil:1"


@pytest.mark.parametrize(("change", "words"), [(_later, "schemaVersion 99"), (_damage, "does not match its digest")])
def test_an_unreadable_revision_is_loud_and_nothing_is_planned_anew(ready_world, change, words: str) -> None:
    name = f"tiny-{ready_world.served_hash()}"
    real = copy.deepcopy(ready_world.cluster.objects[CONTROLLER_REVISION, "ml", name])
    ready_world.cluster.listener = None  # while the operator is down
    _put_anew(ready_world, name, change)
    before = _everything(ready_world)
    ready_world.restart_operator()
    ready_world.settle()
    assert _everything(ready_world) == before
    for kind in ("Stalled", "Ready"):
        assert ready_world.condition(kind)[1] == "RevisionUnreadable"
    assert name in ready_world.message("Stalled")
    assert words in ready_world.message("Stalled")
    assert _events(ready_world, "RevisionUnreadable")
    assert ready_world.condition("Available") == ("True", "Serving")
    ready_world.edit(context={"maxModelLen": 1024}, replicas=3)
    assert _everything(ready_world) == before, "an edit is no leave to plan past it"
    _put_anew(ready_world, name, lambda body: body.update(data=real["data"]))
    ready_world.edit(context={"maxModelLen": 2048}, replicas=1)
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_an_unreadable_revision_of_the_past_stops_nothing(ready_world) -> None:
    old = ready_world.served_hash()
    ready_world.edit(context={"maxModelLen": 1024})
    ready_world.make_ready()
    _put_anew(ready_world, f"tiny-{old}", _later)
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert f"tiny-{old}" in ready_world.message("Planned")
    assert _events(ready_world, "RevisionUnreadable")
    ready_world.edit(replicas=2)
    assert list(ready_world.deployments().values()) == [2]


def test_a_revision_that_is_deleted_is_made_again(ready_world) -> None:
    """The way out of one that cannot be read."""
    pods, name = _uids(ready_world), ready_world.served_hash()
    ready_world.cluster.remove(CONTROLLER_REVISION, "ml", f"tiny-{name}")
    ready_world.settle()
    assert list(_revisions(ready_world)) == [name]
    assert _uids(ready_world) == pods, "the same spec, nodes and release make the same revision"
