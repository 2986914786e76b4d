"""ModelAdapters: taken or refused, loaded on every worker, rolled out with the old version serving, drained.

Workers are fakes that take whole sets, as the real ones do.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from adapter_workers import AdapterFleet, adapter, edit, fleet_of_two, message, ready, shown, wait

from modelserve.api.model_adapter import ModelAdapterSpec
from modelserve.errors import InvalidInput
from modelserve_operator.adapters.versions import Version
from modelserve_operator.allowed import AllowRule
from modelserve_operator.cluster.kinds import (
    CONFIG_MAP,
    HTTP_ROUTE,
    INFERENCE_POOL,
    MODEL_ADAPTER,
    MODEL_REWRITE,
    MODEL_SERVE,
    POD,
    REFERENCE_GRANT,
    SECRET,
)
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.settings import Settings

GRANT = {
    "metadata": {"name": "adapters", "namespace": "ml"},
    "spec": {
        "from": [{"group": "serving.modelserve.dev", "kind": "ModelAdapter", "namespace": "team"}],
        "to": [{"group": "serving.modelserve.dev", "kind": "ModelServe", "name": "tiny"}],
    },
}


@pytest.fixture
def fleet(world, tiny_spec, tiny_facts) -> AdapterFleet:
    """Of a ModelServe with room for 60 versions."""
    return fleet_of_two(world, tiny_spec, tiny_facts, room=60)


def _create(world: Any, *names: str, **spec: Any) -> None:
    for name in names:
        adapter(world, name, **spec)
    wait(world)


def test_an_adapter_is_loaded_on_every_worker_and_what_it_changes_is_shown(fleet, world) -> None:
    _create(world, "legal")
    assert ready(world, "legal") == ("True", "Serving")
    status = shown(world, "legal")
    assert (status["workers"], status["readyOn"], status["rank"]) == ({"ready": 2, "total": 2}, "2/2", 8)
    assert status["probe"] == {
        "kl": "0.0123", "top1Changed": "0.25", "prompts": 8, "strength": "qkv 0.012, down 3",
    }  # fmt: skip
    assert status["activeVersion"]["uri"] == "hf://team/legal"
    assert status["digest"] == status["activeVersion"]["digest"]
    assert all(worker.weights("legal") == {"hf://team/legal": 100} for worker in fleet.workers.values())
    assert [each["type"] for each in status["conditions"]] == ["Ready", "Accepted"], "kstatus: nothing is on its way"
    assert any(event["involvedObject"]["kind"] == "ModelAdapter" for event in world.cluster.events)


def test_pods_with_room_find_whose_key_they_take_sets_by_before_there_is_an_adapter(fleet, world) -> None:
    """The kubelet brings what comes later to pods that run after a minute and more. A set that is there stays."""
    (before,) = [each for each in world.cluster.of(CONFIG_MAP) if each["metadata"]["name"] == "tiny-adapters"]
    assert json.loads(before["data"]["adapters.json"]) == {"adapters": []}
    assert before["data"]["management-keys"].startswith("sha256:")
    assert fleet.workers == {}, "nobody is asked before there is one"
    world.rest()
    world.restart_operator()
    wait(world, seconds=61.0)
    assert world.rest() == []
    world.cluster.remove(CONFIG_MAP, "ml", "tiny-adapters")
    world.settle()
    assert [each["data"] for each in world.cluster.of(CONFIG_MAP) if each["metadata"]["name"] == "tiny-adapters"] == [
        before["data"]
    ]


def test_at_rest_nothing_is_written_and_no_worker_is_told(fleet, world) -> None:
    _create(world, "legal", "medical")
    world.rest()
    told = [worker.sets_taken for worker in fleet.workers.values()]
    wait(world, seconds=61.0, times=4)
    assert (world.rest(), [worker.sets_taken for worker in fleet.workers.values()]) == ([], told)
    world.restart_operator()
    wait(world, seconds=61.0, times=2)
    assert world.rest() == [], "an operator that starts anew tells workers once more, and writes nothing"


def test_fifty_adapters_on_two_workers(fleet, world) -> None:
    _create(world, *(f"tenant-{number:02}" for number in range(50)))
    assert {ready(world, f"tenant-{number:02}") for number in range(50)} == {("True", "Serving")}
    assert [len(worker.versions) for worker in fleet.workers.values()] == [50, 50]
    assert world.condition("Ready") == ("True", "RolledOut"), "the ModelServe has nothing to do with it"


def test_a_new_version_takes_over_when_it_is_ready_everywhere(fleet, world) -> None:
    _create(world, "legal", "medical")
    workers = fleet.workers.values()
    edit(world, "legal", uri="hf://team/legal-2")
    world.settle()
    assert {worker.weights("legal")["hf://team/legal"] for worker in workers} == {100}, "it loads beside the old one"
    assert ready(world, "legal") == ("False", "RollingOut")
    wait(world)
    assert all(worker.weights("legal") == {"hf://team/legal-2": 100} for worker in workers)
    assert ready(world, "legal") == ("True", "Serving")
    assert shown(world, "legal")["previousVersion"]["uri"] == "hf://team/legal"
    assert all(len(worker.versions) == 2 for worker in workers), "the old one is drained, the bystander is there"


def test_the_old_version_stays_until_the_last_worker_is_ready(fleet, world) -> None:
    _create(world, "legal")
    slow = sorted(fleet.workers)[1]
    fleet.workers[slow].reachable = False
    edit(world, "legal", uri="hf://team/legal-2")
    wait(world, seconds=20.0)
    assert ready(world, "legal") == ("False", "WorkersUnreachable")
    assert all(worker.weights("legal")["hf://team/legal"] == 100 for worker in fleet.workers.values())
    assert shown(world, "legal")["problems"][0]["worker"] == slow
    fleet.workers[slow].reachable = True
    wait(world, seconds=20.0)
    assert ready(world, "legal") == ("True", "Serving")


def test_with_a_weight_both_versions_serve_until_it_is_raised(fleet, world) -> None:
    _create(world, "legal")
    edit(world, "legal", uri="hf://team/legal-2", rollout={"weight": 30})
    wait(world)
    assert ready(world, "legal") == ("True", "Shared")
    for worker in fleet.workers.values():
        assert worker.weights("legal") == {"hf://team/legal": 70, "hf://team/legal-2": 30}
    assert shown(world, "legal")["nextVersion"]["weight"] == 30
    edit(world, "legal", rollout={"weight": 100})
    wait(world)
    assert all(worker.weights("legal") == {"hf://team/legal-2": 100} for worker in fleet.workers.values())


def test_a_worker_that_starts_during_a_rollout_answers_by_what_it_has(fleet, world) -> None:
    _create(world, "legal")
    edit(world, "legal", uri="hf://team/legal-2", rollout={"weight": 30})
    wait(world)
    first = next(iter(fleet.workers.values()))
    first.versions = {key: each for key, each in first.versions.items() if each["uri"] == "hf://team/legal"}
    world.pass_time(61.0)
    told = {one["uri"]: one["weight"] for each in first.wanted["adapters"] for one in each["versions"]}
    assert told == {"hf://team/legal": 100, "hf://team/legal-2": 0}, "none is sent to what it has not"
    wait(world)
    assert {worker.weights("legal")["hf://team/legal-2"] for worker in fleet.workers.values()} == {30}


@pytest.mark.parametrize(
    ("state", "reason"),
    [("Failed", "LoadFailed"), ("NoEffect", "NoEffect"), ("PartlyNoEffect", "PartlyNoEffect")],
)
def test_a_broken_version_leaves_the_old_one_serving(fleet, world, state: str, reason: str) -> None:
    _create(world, "legal", "medical")
    fleet.broken["hf://team/legal-2"] = state
    edit(world, "legal", uri="hf://team/legal-2")
    wait(world, times=10)
    assert ready(world, "legal") == ("False", reason)
    assert "x_proj binds to nothing" in message(world, "legal")
    assert "hf://team/legal, serves" in message(world, "legal")
    assert {each["type"] for each in shown(world, "legal")["conditions"]} == {"Ready", "Accepted", "Stalled"}
    assert all(worker.weights("legal") == {"hf://team/legal": 100} for worker in fleet.workers.values())
    assert shown(world, "legal")["activeVersion"]["uri"] == "hf://team/legal"
    assert ready(world, "medical") == ("True", "Serving")
    edit(world, "legal", uri="hf://team/legal")
    wait(world)
    assert ready(world, "legal") == ("True", "Serving")
    assert all(len(worker.versions) == 2 for worker in fleet.workers.values())


def test_a_first_version_that_is_broken_gives_way_at_once(fleet, world) -> None:
    fleet.broken["hf://team/legal"] = "Failed"
    _create(world, "legal")
    assert ready(world, "legal") == ("False", "LoadFailed")
    assert "activeVersion" not in shown(world, "legal")
    edit(world, "legal", uri="hf://team/mended")
    wait(world)
    assert ready(world, "legal") == ("True", "Serving")
    assert all(worker.weights("legal") == {"hf://team/mended": 100} for worker in fleet.workers.values())


def test_a_deleted_adapter_is_drained_before_its_object_goes(fleet, world) -> None:
    _create(world, "legal", "medical")
    world.cluster.remove(MODEL_ADAPTER, "ml", "legal")
    world.settle()
    assert ready(world, "legal") == ("False", "Draining")
    assert all(
        each["state"] == "Draining" for w in fleet.workers.values() for k, each in w.versions.items() if k[0] == "legal"
    )
    wait(world)
    assert [body["metadata"]["name"] for body in world.cluster.of(MODEL_ADAPTER)] == ["medical"]
    assert all({name for name, _ in worker.versions} == {"medical"} for worker in fleet.workers.values())


def test_a_dead_worker_holds_a_deletion_for_a_while_only(fleet, world) -> None:
    _create(world, "legal")
    next(iter(fleet.workers.values())).reachable = False
    world.cluster.remove(MODEL_ADAPTER, "ml", "legal")
    wait(world, seconds=16.0, times=6)
    assert world.cluster.of(MODEL_ADAPTER) != [], "it may still answer requests there"
    wait(world, seconds=16.0, times=4)
    assert world.cluster.of(MODEL_ADAPTER) == []
    assert "DrainAbandoned" in [event["reason"] for event in world.cluster.events]


def test_a_deletion_waits_for_no_model_serve_that_is_gone(fleet, world) -> None:
    _create(world, "legal")
    world.cluster.remove(MODEL_SERVE, "ml", "tiny")
    world.settle()
    assert ready(world, "legal") == ("False", "ModelServeNotFound")
    world.cluster.remove(MODEL_ADAPTER, "ml", "legal")
    world.settle()
    assert world.cluster.of(MODEL_ADAPTER) == []


def test_without_room_for_adapters_the_remedy_is_said(ready_world) -> None:
    ready_world.serve(MODEL_ADAPTER)
    _create(ready_world, "legal")
    assert ready(ready_world, "legal") == ("False", "AdaptersNotEnabled")
    assert "spec.adapters.max" in message(ready_world, "legal")
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_the_oldest_stay_where_there_are_too_many(fleet, world) -> None:
    world.edit("tiny", adapters={"max": 2})
    _create(world, "c", "b", "a")
    assert [ready(world, name)[1] for name in "cba"] == ["Serving", "Serving", "TooManyAdapters"]
    assert "is 2" in message(world, "a")
    world.cluster.remove(MODEL_ADAPTER, "ml", "c")
    wait(world)
    assert ready(world, "a") == ("True", "Serving")


def test_a_rollout_without_room_for_a_second_version_says_so_and_the_first_serves(fleet, world) -> None:
    world.edit("tiny", adapters={"max": 2})
    _create(world, "a", "b")
    edit(world, "a", uri="hf://team/a-2")
    wait(world)
    assert ready(world, "a") == ("False", "NoRoomForRollout")
    assert all(worker.weights("a") == {"hf://team/a": 100} for worker in fleet.workers.values())
    world.cluster.remove(MODEL_ADAPTER, "ml", "b")
    wait(world, times=10)
    assert all(worker.weights("a") == {"hf://team/a-2": 100} for worker in fleet.workers.values())


def test_a_name_is_the_oldest_ones(fleet, world) -> None:
    _create(world, "a", "b", servedName="legal")
    assert [ready(world, name)[1] for name in "ab"] == ["Serving", "NameTaken"]
    assert all(worker.weights("legal") == {"hf://team/a": 100} for worker in fleet.workers.values())
    _create(world, "d", servedName="tiny")
    assert ready(world, "d") == ("False", "NameTaken"), "the model itself is served as tiny"


def test_another_namespace_needs_a_grant(fleet, world) -> None:
    _create(world, "legal", namespace="team")
    assert ready(world, "legal", namespace="team") == ("False", "ReferenceNotGranted")
    assert "serves no ReferenceGrant" in message(world, "legal", namespace="team")
    world.serve(REFERENCE_GRANT)
    wait(world)
    assert "has no ReferenceGrant" in message(world, "legal", namespace="team")
    other = copy.deepcopy(GRANT)
    other["metadata"]["name"], other["spec"]["to"][0]["name"] = "other", "another"
    world.cluster.put(REFERENCE_GRANT, other)
    wait(world)
    assert ready(world, "legal", namespace="team") == ("False", "ReferenceNotGranted")
    world.cluster.put(REFERENCE_GRANT, GRANT)
    wait(world)
    assert ready(world, "legal", namespace="team") == ("True", "Serving")
    world.cluster.remove(REFERENCE_GRANT, "ml", "adapters")
    wait(world)
    assert ready(world, "legal", namespace="team") == ("False", "ReferenceNotGranted")
    assert all(not worker.versions for worker in fleet.workers.values()), "what is no longer granted is served no more"


def test_addresses_are_those_that_the_installation_allows(fleet, world) -> None:
    world.settings = Settings(
        worker_image="worker:test", allowed=(AllowRule(namespaces=("*",), adapters=("hf://own/*",)),)
    )
    world.restart_operator()
    _create(world, "legal")
    assert ready(world, "legal") == ("False", "NotAllowed")
    assert "hf://own/*" in message(world, "legal")
    edit(world, "legal", uri="hf://own/legal")
    wait(world)
    assert ready(world, "legal") == ("True", "Serving")


def test_a_forged_status_has_workers_load_nothing_that_is_not_allowed(fleet, world) -> None:
    world.settings = Settings(
        worker_image="worker:test", allowed=(AllowRule(namespaces=("*",), adapters=("hf://team/*",)),)
    )
    world.restart_operator()
    _create(world, "legal")

    def forge(body: dict[str, Any]) -> None:
        version = Version("hf://evil/weights")
        body["status"]["activeVersion"] |= {"uri": version.uri, "id": version.id}

    world.cluster.change(MODEL_ADAPTER, "legal", forge)
    wait(world)
    assert not any(each["uri"] == "hf://evil/weights" for w in fleet.workers.values() for each in w.versions.values())
    assert ready(world, "legal") == ("True", "Serving")


def test_a_claim_is_read_where_workers_mount_it(fleet, world) -> None:
    _create(world, "own", uri="pvc://weights/loras/own")
    _create(world, "other", uri="pvc://elsewhere/loras/x")
    assert [ready(world, name)[1] for name in ("own", "other")] == ["Serving", "ClaimNotMounted"]
    assert all(worker.weights("own") == {"/models/loras/own": 100} for worker in fleet.workers.values())


def test_a_token_comes_from_the_adapters_own_namespace_and_goes_to_workers_alone(fleet, world) -> None:
    _create(world, "legal", secretRef={"name": "hub"})
    assert ready(world, "legal") == ("False", "SecretUnreadable")
    world.cluster.put(SECRET, {"metadata": {"name": "hub", "namespace": "ml"}, "data": {"token": "aGZfc2VjcmV0"}})
    edit(world, "legal", pin=True)  # nothing tells of a Secret but the next look
    wait(world, seconds=61.0)
    assert ready(world, "legal") == ("True", "Serving")
    for worker in fleet.workers.values():
        assert worker.wanted["adapters"][0]["versions"][0]["token"] == "hf_secret"
    (written,) = (body for body in world.cluster.of(CONFIG_MAP) if body["metadata"]["name"] == "tiny-adapters")
    assert "hf_secret" not in str(written)
    assert "hf_secret" not in str(world.cluster.events) + str(world.cluster.of(MODEL_ADAPTER))


def test_workers_that_start_read_the_set_and_know_the_operator_by_a_digest(fleet, world) -> None:
    _create(world, "legal")
    (written,) = (body for body in world.cluster.of(CONFIG_MAP) if body["metadata"]["name"] == "tiny-adapters")
    assert '"hf://team/legal"' in written["data"]["adapters.json"]
    assert len(written["data"]["management-keys"].strip()) == len("sha256:") + 64
    pod = world.cluster.of(POD)[0]["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "adapters")
    assert volume["configMap"] == {"name": "tiny-adapters", "optional": True}
    (worker,) = pod["containers"]
    assert {"name": "MODELSERVE_ADAPTERS_DIR", "value": "/etc/modelserve-adapters"} in worker["env"]


def test_a_model_serve_that_cannot_be_read_keeps_its_adapters(fleet, world) -> None:
    _create(world, "legal")
    world.edit("tiny", context={"minModelLen": 4096, "maxModelLen": 2048})
    wait(world)
    assert ready(world, "legal") == ("False", "ModelServeInvalid")
    assert all(worker.weights("legal") == {"hf://team/legal": 100} for worker in fleet.workers.values())


def test_an_object_that_cannot_be_written_keeps_no_other_from_it(fleet, world) -> None:
    _create(world, "a")

    def refuse(kind: Any, body: dict[str, Any]) -> None:
        if kind is MODEL_ADAPTER and body["metadata"]["name"] == "b":
            raise KubeError(403, "a policy says no")

    world.cluster.admission = refuse
    adapter(world, "b")
    adapter(world, "c")
    for _ in range(8):
        with pytest.raises(KubeError, match="a policy says no"):
            world.settle()
        world.adapters_pending |= set(world.adapter_gatherer.targets())
    assert ready(world, "c") == ("True", "Serving")
    assert all({name for name, _ in worker.versions} == {"a", "c"} for worker in fleet.workers.values()), (
        "what is not held cannot be drained, so no worker gets it"
    )


def test_of_an_invalid_object_the_field_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"spec\.uri"):
        ModelAdapterSpec.parse({"modelRef": {"name": "m"}, "uri": "file:///etc"})
    with pytest.raises(InvalidInput, match="revision is of an hf:// address"):
        ModelAdapterSpec.parse({"modelRef": {"name": "m"}, "uri": "s3://bucket/x", "revision": "v1"})
    spec, unknown = ModelAdapterSpec.parse({"modelRef": {"name": "m"}, "uri": "hf://a/b", "later": 1})
    assert (spec.uri, unknown) == ("hf://a/b", ("later",))


class _Killed(BaseException):
    """The operator's process ends here."""


STORY = ("create", "roll out", "share", "delete")


def _story(world: Any, step: str) -> None:
    if step == "create":
        adapter(world, "legal")
    elif step == "roll out":
        edit(world, "legal", uri="hf://team/legal-2")
    elif step == "share":
        edit(world, "legal", uri="hf://team/legal-3", rollout={"weight": 50})
    else:
        world.cluster.remove(MODEL_ADAPTER, "ml", "legal")


@pytest.mark.parametrize("killed_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", range(12))
def test_an_operator_that_is_killed_at_any_write_goes_on_from_the_objects(fleet, world, place, killed_before) -> None:
    """Each step of an adapter's life with an end of the process at its `place`-th write, also one to a worker; whatever
    is left, some version serves whenever there was one."""
    _create(world, "bystander")
    served = False
    for step in STORY:
        writes = 0

        def between(request: Any) -> None:
            nonlocal writes
            writing = request.verb in ("apply", "json_patch") or (request.verb == "manage_worker" and request.body)
            if writing:
                writes += 1
                if writes == place + 1:
                    raise _Killed

        _story(world, step)
        setattr(world.cluster, "asked" if killed_before else "answered", between)
        try:
            wait(world)
        except _Killed:
            world.cluster.asked = world.cluster.answered = None
            _always_serves(fleet, served and step != "delete")
            _answers_as_ready_says(fleet, world)
            world.restart_operator()
        world.cluster.asked = world.cluster.answered = None
        for _ in range(8):
            wait(world, times=1)
            _always_serves(fleet, served and step != "delete")
            _answers_as_ready_says(fleet, world)
        served = step != "delete"
        assert all(worker.weights("bystander") for worker in fleet.workers.values())
        if step == "delete":
            assert [body["metadata"]["name"] for body in world.cluster.of(MODEL_ADAPTER)] == ["bystander"]
            assert all("legal" not in {name for name, _ in worker.versions} for worker in fleet.workers.values())
        else:
            assert ready(world, "legal") == ("True", "Shared" if step == "share" else "Serving"), step


def _always_serves(fleet: AdapterFleet, served: bool) -> None:
    """Whoever asked before can go on: on every worker versions that are Ready have all of the weight."""
    if served:
        assert {sum(worker.weights("legal").values()) for worker in fleet.workers.values()} == {100}


def _answers_as_ready_says(fleet: AdapterFleet, world: Any) -> None:
    """Where Ready is True of the newest spec, every worker answers by its weight already."""
    body = world.cluster.objects.get((MODEL_ADAPTER, "ml", "legal"), {})
    conditions = {each["type"]: each for each in body.get("status", {}).get("conditions", ())}
    found = conditions.get("Ready", {"status": "False"})
    if found["status"] == "True" and found["observedGeneration"] == body["metadata"]["generation"]:
        weight = body["spec"].get("rollout", {}).get("weight", 100)
        told = [worker.weights("legal") for worker in fleet.workers.values()]
        assert [each[body["spec"]["uri"]] for each in told] == [weight] * 2
        assert [len(each) for each in told] == [1 if weight == 100 else 2] * 2


def test_an_endpoint_picker_splits_where_workers_know_versions_by_name(fleet, world) -> None:
    world.serve(HTTP_ROUTE, INFERENCE_POOL, MODEL_REWRITE)
    gateway = {"parentRefs": [{"name": "public"}], "endpointPicker": {"name": "picker", "port": 9002}}
    world.edit("tiny", gateway=gateway)
    _create(world, "legal")
    edit(world, "legal", uri="hf://team/legal-2", rollout={"weight": 30})
    wait(world)
    assert ready(world, "legal") == ("True", "Shared")
    assert world.cluster.of(MODEL_REWRITE) == [], "the workers split alone"
    fleet.version_names = True
    wait(world, seconds=61.0, times=2)
    (rewrite,) = world.cluster.of(MODEL_REWRITE)
    (pool,) = world.cluster.of(INFERENCE_POOL)
    assert rewrite["spec"]["poolRef"]["name"] == pool["metadata"]["name"]
    (rule,) = rewrite["spec"]["rules"]
    assert rule["matches"] == [{"model": {"type": "Exact", "value": "legal"}}]
    status = shown(world, "legal")
    named = {f"legal@{status[field]['id']}": status[field]["weight"] for field in ("activeVersion", "nextVersion")}
    assert {each["modelRewrite"]: each["weight"] for each in rule["targets"]} == named
    assert sorted(named.values()) == [30, 70]
    world.rest()
    wait(world, seconds=61.0, times=2)
    assert world.rest() == []
    edit(world, "legal", rollout={"weight": 100})
    wait(world)
    assert world.cluster.of(MODEL_REWRITE) == []
