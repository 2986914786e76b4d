"""spec.drafter: how an assistant reaches the pods, what keeps it from them, and that neither hurts who serves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from configs import assistant_config_json

from modelserve.api import PlanStatus
from modelserve.engine_args import EngineArgs
from modelserve.inspection import read_drafter
from modelserve.measured_drafts import MeasuredDrafts
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.planning.learned import pair_of
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, JOB, POD
from modelserve_operator.manifests.worker_template import with_worker
from modelserve_operator.observed.snapshot import WorkerReport
from modelserve_operator.planning.drafters import acceptance_of
from modelserve_operator.revisions.revision import Worker
from modelserve_operator.sources import ModelSource

E2B = {"uri": "hf://google/gemma-4-E2B-it"}
DRAFTED = {"drafter": {"published": True}, "workload": {"concurrency": 2}}
DRAFTS, MOVED = "d1" * 20, "e2" * 20


@pytest.fixture
def assistant(tiny_facts: ModelFacts) -> AssistantFacts:
    """Of `tiny_facts`."""
    target = tiny_facts.architecture
    read = AssistantArchitecture.from_config(assistant_config_json())
    update = {
        "backbone_hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        "head_dim": target.head_dim, "global_head_dim": target.global_head_dim, "sliding_window": target.sliding_window,
        "num_key_value_heads": target.num_key_value_heads, "rms_norm_eps": target.rms_norm_eps,
        "num_global_key_value_heads": target.num_global_key_value_heads,
        "max_position_embeddings": target.max_position_embeddings,
    }  # fmt: skip
    return AssistantFacts(assistant=read.model_copy(update=update), weight_bytes=500_000)


@pytest.fixture
def gpus(world):
    """A GPU node, and a bystander that serves on it."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    world.create({"model": {"uri": "hf://google/gemma-4-E4B-it"}}, name="other")
    world.make_ready()
    return world


def _template(world, name: str = "big") -> dict[str, Any]:
    return dict(world.deployment_of(name)["spec"]["template"]["spec"])


def _settings(world, name: str = "big") -> EngineArgs:
    (body,) = [b for b in world.cluster.of(CONTROLLER_REVISION) if labels.label_of(b, labels.NAME) == name]
    return EngineArgs.model_validate(body["data"]["engine"])


def _fetched(
    world, pod: dict[str, Any], told: dict[str, str], *, exit_code: int = 0, container: str = "fetch-drafter"
) -> None:
    """The download of the assistant ended, saying this."""
    before = pod["status"].get("initContainerStatuses", [])
    end = {"exitCode": exit_code, "message": json.dumps(told) if told else ""}
    status = [*before, {"name": container, "state": {"terminated": end}}]
    world.cluster.set_pod(pod, phase="Pending", initContainerStatuses=status)
    world.settle()


def _pods(world, name: str = "big") -> list[dict[str, Any]]:
    return [body for body in world.cluster.of(POD) if labels.label_of(body, labels.NAME) == name]


def _bystander(world) -> str:
    objects = [b for kind in (POD, DEPLOYMENT, CONTROLLER_REVISION) for b in world.cluster.of(kind)]
    return json.dumps([b for b in objects if labels.label_of(b, labels.NAME) == "other"] + [world.status("other")])


def test_the_published_assistant_is_fetched_beside_the_model_and_counted(gpus) -> None:
    before = _bystander(gpus)
    gpus.create({"model": {**E2B, "authSecretRef": {"name": "hf"}}, **DRAFTED}, name="big")
    plan, pod, settings = gpus.status("big")["plan"], _template(gpus), _settings(gpus)
    assert plan["drafter"] == {"uri": "hf://google/gemma-4-E2B-it-assistant", "revision": "main"}
    *_, fetch = pod["initContainers"]
    directory = "/models/google/gemma-4-E2B-it-assistant/main"
    assert [each["name"] for each in pod["initContainers"]] == ["resolve", "fetch", "fetch-drafter"]
    assert fetch["command"] == [
        "modelserve-worker", "fetch", "--uri", "hf://google/gemma-4-E2B-it-assistant", "--revision", "main",
        "--dest", directory, "--optional", "--recorded", "/etc/modelserve-commit-drafter/commit",
    ]  # fmt: skip
    assert "HF_TOKEN" in {each["name"] for each in fetch["env"]}, "the model's token"
    assert (settings.drafter, settings.drafter_optional, settings.num_speculative_tokens) == (directory, True, "auto")
    assert [each["name"] for each in pod["volumes"]].count("weights") == 1
    assert {mount["name"] for mount in fetch["volumeMounts"]} == {"tmp", "weights", "commit-drafter"}
    assert _bystander(gpus) == before


def test_without_a_drafter_nothing_of_it_is_in_pods_or_plans(gpus) -> None:
    gpus.create({"model": E2B, "drafter": {}}, name="big")
    gpus.create({"model": E2B}, name="plain")
    assert gpus.revision("big") == gpus.revision("plain"), "an empty object says nothing"
    assert "drafter" not in gpus.status("big")["plan"]
    assert "drafter" not in json.dumps(_template(gpus))
    assert _settings(gpus).drafter is None


def test_the_commit_of_an_assistant_is_pinned_once(gpus) -> None:
    gpus.create({"model": E2B, **DRAFTED, "replicas": 3}, name="big")
    (pod,) = _pods(gpus)
    _fetched(gpus, pod, {"commit": DRAFTS})
    assert len(_pods(gpus)) == 3, "the first has told"
    (body,) = [b for b in gpus.cluster.of(CONTROLLER_REVISION) if labels.label_of(b, labels.NAME) == "big"]
    assert labels.annotation_of(body, labels.DRAFTER_COMMIT) == DRAFTS
    assert labels.annotation_of(body, labels.MODEL_COMMIT) == gpus.cluster.hub
    (volume,) = [v for v in _template(gpus)["volumes"] if v["name"] == "commit-drafter"]
    recorded = gpus.cluster.objects[CONFIG_MAP, "ml", volume["configMap"]["name"]]
    assert recorded["data"] == {"commit": DRAFTS}
    assert gpus.status("big")["drafterCommit"] == DRAFTS
    for each in _pods(gpus):
        if each["metadata"]["uid"] != pod["metadata"]["uid"]:
            _fetched(gpus, each, {"commit": MOVED})
    assert gpus.status("big")["drafterCommit"] == DRAFTS
    gpus.make_ready()
    gpus.rest()
    gpus.restart_operator()
    gpus.settle()
    assert gpus.rest() == []
    gpus.edit("big", context={"maxModelLen": 4096})
    assert gpus.status("big")["drafterCommit"] == DRAFTS, "another plan keeps it"


def test_an_assistant_that_cannot_be_fetched_is_said_and_holds_up_nobody(gpus) -> None:
    before = _bystander(gpus)
    gpus.create({"model": E2B, **DRAFTED, "replicas": 2}, name="big")
    (pod,) = _pods(gpus)
    _fetched(gpus, pod, {"problem": "hf://google/gemma-4-E2B-it-assistant does not exist on the Hub"})
    assert len(_pods(gpus)) == 2
    gpus.make_ready()
    assert gpus.condition("Ready", "big") == ("True", "RolledOut")
    assert gpus.condition("Stalled", "big") is None
    assert "serve without the drafter" in gpus.message("Planned", "big")
    assert "does not exist on the Hub" in gpus.message("Planned", "big")
    assert [e["reason"] for e in gpus.cluster.events].count("DrafterUnavailable") == 1
    gpus.rest()
    gpus.pass_time(3600)
    assert [write for write in gpus.rest() if write[0] != "patch/status"] == []
    assert _bystander(gpus) == before


def test_a_download_that_ends_badly_is_no_terminal_failure(gpus) -> None:
    gpus.create({"model": E2B, **DRAFTED}, name="big")
    (pod,) = _pods(gpus)
    _fetched(gpus, pod, {}, exit_code=TERMINAL_EXIT_CODE)
    assert list(gpus.deployments().values()) == [1, 1]
    gpus.make_ready()
    assert "its download ended with exit code 78" in gpus.message("Planned", "big")


def test_what_workers_say_of_their_drafts_is_told_and_ends_no_worker(gpus) -> None:
    gpus.create({"model": E2B, **DRAFTED, "replicas": 1}, name="big")
    gpus.make_ready()
    (pod,) = _pods(gpus)
    plan = gpus.cluster.worker_plans[pod["metadata"]["name"]]
    other, uids = _bystander(gpus), {p["metadata"]["uid"] for p in gpus.cluster.of(POD)}
    for drafts, reason in (
        ({"lowAcceptance": True}, "LowDraftAcceptance"),
        ({"acceptance": 0.4}, None),
        ({"acceptance": 0.35}, "LowDraftAcceptance"),  # of 0.75, as with one kind of the rows that it reads wrong
        ({"problem": "config.json is missing"}, "DrafterUnavailable"),
        ({"lowAcceptance": "nonsense", "problem": 7}, None),
    ):
        plan["drafts"] = drafts
        gpus.cluster.events.clear()
        gpus.pass_time(301)
        gpus.pending = gpus.gatherer.known_keys()
        gpus.settle()
        gpus.settle()
        assert [e["reason"] for e in gpus.cluster.events] == ([reason] if reason else [])
        assert gpus.condition("Ready", "big") == ("True", "RolledOut")
        assert {p["metadata"]["uid"] for p in gpus.cluster.of(POD)} == uids
        assert _bystander(gpus) == other


@pytest.mark.parametrize(
    ("model", "drafter", "storage", "volume", "directory"),
    [
        ("pvc://weights/tiny", "pvc://weights/drafts", None, "weights", "/models/drafts"),
        ("pvc://weights/tiny", "pvc://others/a/b", None, "drafter", "/drafter/a/b"),
        ("pvc://weights/tiny", "hf://own/drafts", None, "drafter", "/drafter/own/drafts/main"),
        ("pvc://weights/tiny", "hf://own/drafts", "others", "drafter", "/drafter/own/drafts/main"),
        ("pvc://weights/tiny", "hf://own/drafts", "weights", "weights", "/models/own/drafts/main"),
    ],
)
def test_an_assistant_of_ones_own_is_read_and_lies_where_it_is(
    model: str, drafter: str, storage: str | None, volume: str, directory: str, world, tiny_spec, tiny_facts, assistant
) -> None:
    spec = {**tiny_spec, "model": {"uri": model}, "drafter": {"uri": drafter, "numSpeculativeTokens": 3}}
    world.cluster.put(*_claim("others"))
    world.create(spec if storage is None else {**spec, "storage": {"pvcName": storage}})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Planned") == ("Unknown", "InspectingModel")
    assert drafter in world.message("Planned")
    (job,) = world.cluster.of(JOB)
    (inspect,) = job["spec"]["template"]["spec"]["containers"]
    assert "--drafter" in inspect["command"]
    world.cluster.end_job(message=assistant.model_dump_json(by_alias=True))
    world.settle()
    assert world.cluster.of(JOB) == []
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    settings, pod = _settings(world, "tiny"), _template(world, "tiny")
    assert (settings.drafter, settings.num_speculative_tokens) == (directory, 3)
    (worker,) = pod["containers"]
    mounts = {mount["name"]: mount for mount in worker["volumeMounts"]}
    assert mounts[volume]["readOnly"] is True
    assert directory.startswith(mounts[volume]["mountPath"])
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert len(claims) == len(set(claims)), "a claim is not mounted twice"
    downloaded = drafter.startswith("hf://")
    assert [each["name"] for each in pod.get("initContainers", [])] == (["fetch-drafter"] if downloaded else [])
    world.rest()
    world.restart_operator()
    world.settle()
    assert world.rest() == [], "what was read is kept"


def _claim(name: str) -> tuple[Any, dict[str, Any]]:
    metadata = {"name": name, "namespace": "ml"}
    return CLAIM, {"metadata": metadata, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {}}


def test_an_assistant_that_cannot_be_read_leaves_the_model_served(ready_world, tiny_facts, assistant) -> None:
    pods = copy.deepcopy(ready_world.cluster.of(POD))
    ready_world.edit(drafter={"uri": "pvc://weights/nothing"})
    ready_world.cluster.end_job(message="no config.json", exit_code=TERMINAL_EXIT_CODE)
    ready_world.settle()
    assert ready_world.condition("Available") == ("True", "Serving")
    assert "Planned without the drafter" in ready_world.message("Planned")
    for _ in range(4):
        ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert "DrafterUnavailable" in [e["reason"] for e in ready_world.cluster.events]
    assert _settings_of_last(ready_world).drafter is None
    ready_world.pass_time(61)
    ready_world.cluster.end_job(message=assistant.model_dump_json(by_alias=True))
    ready_world.settle()
    assert ready_world.condition("Ready") == ("True", "RolledOut"), "what runs stays until the newer plan is approved"
    assert ready_world.status()["proposedPlan"]["drafter"] == {"uri": "pvc://weights/nothing"}
    assert "Planned without" not in ready_world.message("Planned")
    assert pods


def _settings_of_last(world) -> EngineArgs:
    bodies = [b for b in world.cluster.of(CONTROLLER_REVISION) if labels.label_of(b, labels.NAME) == "tiny"]
    return EngineArgs.model_validate(max(bodies, key=lambda body: body["revision"])["data"]["engine"])


def test_an_image_of_a_release_without_drafts_is_not_given_one(gpus) -> None:
    gpus.create({"model": E2B, **DRAFTED, "image": "worker:0.1.0"}, name="big")
    assert "worker worker:0.1.0 is of release 0.1.0, which has no drafts" in gpus.message("Planned", "big")
    assert "drafter" not in json.dumps(_template(gpus))
    (body,) = [b for b in gpus.cluster.of(CONTROLLER_REVISION) if labels.label_of(b, labels.NAME) == "big"]
    assert not {"drafter", "drafterOptional", "numSpeculativeTokens"} & body["data"]["engine"].keys()
    gpus.make_ready()
    assert gpus.condition("Ready", "big") == ("True", "RolledOut")


@pytest.mark.parametrize(("release", "drafts"), [("0.1.0", False), ("0.2.0", True), ("0.3.0", True)])
def test_a_revision_that_moves_to_another_worker_takes_along_what_that_knows(gpus, release: str, drafts: bool) -> None:
    gpus.create({"model": E2B, **DRAFTED}, name="big")
    before, worker = gpus.deployment_of("big")["spec"]["template"], Worker(f"worker:{release}", release)
    moved = with_worker(before, worker=worker, name="big", before=gpus.revision("big"), after="0123456789")["spec"]
    names = [each["name"] for each in moved["initContainers"]]
    assert names == ["resolve", "fetch", *(["fetch-drafter"] if drafts else [])]
    assert {each["image"] for each in (*moved["initContainers"], *moved["containers"])} == {worker.image}
    assert _template(gpus) == before["spec"], "what runs is as it was"


def test_a_claim_of_a_drafter_has_to_be_shareable_too(world, tiny_spec) -> None:
    kind, body = _claim("alone")
    world.cluster.put(kind, {**body, "spec": {"accessModes": ["ReadWriteOnce"]}})
    world.create({**tiny_spec, "replicas": 2, "drafter": {"uri": "pvc://alone/x"}})
    assert world.condition("Accepted") == ("False", "VolumeNotShareable")
    assert "claim alone" in world.message("Accepted")


BOTH = {
    "models": [
        {"kind": "DFlash", "uri": "hf://z-lab/gemma-4-31B-it-DFlash"},
        {"kind": "MTP", "uri": "hf://google/gemma-4-31B-it-assistant"},
    ]
}


def test_two_drafters_are_fetched_pinned_and_named_to_the_worker(gpus) -> None:
    before = _bystander(gpus)
    spec = {"model": {"uri": "hf://google/gemma-4-31B-it"}, "drafter": BOTH, "workload": {"concurrency": 2}}
    gpus.create({**spec, "replicas": 2}, name="big")
    planned = gpus.status("big")["plan"]["drafter"]
    assert [each["kind"] for each in planned["models"]] == ["MTP", "DFlash"]
    pod, settings = _template(gpus), _settings(gpus)
    names = [each["name"] for each in pod["initContainers"]]
    assert names == ["resolve", "fetch", "fetch-drafter", "fetch-drafter-2"]
    directories = ["/models/google/gemma-4-31B-it-assistant/main", "/models/z-lab/gemma-4-31B-it-DFlash/main"]
    assert settings.drafters == tuple(directories)
    for container, directory, place in zip(pod["initContainers"][2:], directories, ("", "-2"), strict=True):
        assert container["command"][-5:] == [
            "--dest", directory, "--optional", "--recorded", f"/etc/modelserve-commit-drafter{place}/commit",
        ]  # fmt: skip
        assert f"commit-drafter{place}" in {mount["name"] for mount in container["volumeMounts"]}
    assert [each["name"] for each in pod["volumes"]].count("weights") == 1
    (first,) = _pods(gpus)
    _fetched(gpus, first, {"commit": DRAFTS})
    assert len(_pods(gpus)) == 1, "the second has not told"
    _fetched(gpus, first, {"commit": MOVED}, container="fetch-drafter-2")
    assert len(_pods(gpus)) == 2
    named = {"hf://google/gemma-4-31B-it-assistant": DRAFTS, "hf://z-lab/gemma-4-31B-it-DFlash": MOVED}
    assert gpus.status("big")["drafterCommits"] == named
    (body,) = [b for b in gpus.cluster.of(CONTROLLER_REVISION) if labels.label_of(b, labels.NAME) == "big"]
    assert labels.annotation_of(body, labels.DRAFTER_COMMITS) == f"{DRAFTS},{MOVED}"
    recorded = {v["name"]: v["configMap"]["name"] for v in pod["volumes"] if v["name"].startswith("commit-drafter")}
    kept = {name: gpus.cluster.objects[CONFIG_MAP, "ml", of]["data"]["commit"] for name, of in recorded.items()}
    assert kept == {"commit-drafter": DRAFTS, "commit-drafter-2": MOVED}
    gpus.make_ready()
    gpus.rest()
    gpus.restart_operator()
    gpus.settle()
    assert gpus.rest() == []
    assert gpus.status("big")["drafterCommits"] == named
    gpus.edit("big", context={"maxModelLen": 4096})
    assert gpus.status("big")["drafterCommits"] == named, "another plan keeps them"
    assert _bystander(gpus) == before


def test_of_two_drafters_the_one_that_could_not_be_fetched_is_said(gpus) -> None:
    spec = {"model": {"uri": "hf://google/gemma-4-31B-it"}, "drafter": BOTH, "workload": {"concurrency": 2}}
    gpus.create({**spec, "replicas": 2}, name="big")
    (pod,) = _pods(gpus)
    _fetched(gpus, pod, {"commit": DRAFTS})
    _fetched(gpus, pod, {"problem": "the disk is full"}, container="fetch-drafter-2")
    assert len(_pods(gpus)) == 2
    gpus.make_ready()
    assert "without the drafter hf://z-lab/gemma-4-31B-it-DFlash, slower and as well: the disk is full" in gpus.message(
        "Planned", "big"
    )
    assert gpus.status("big")["drafterCommits"] == {"hf://google/gemma-4-31B-it-assistant": DRAFTS}


def test_two_drafters_of_ones_own_are_read_both(world, tiny_spec, tiny_facts, assistant) -> None:
    """On a claim of their own, where they share a volume; one that cannot be read is planned without."""
    models = [{"kind": "MTP", "uri": "pvc://others/mtp"}, {"kind": "DFlash", "uri": "pvc://others/dflash"}]
    world.cluster.put(*_claim("others"))
    world.create({**tiny_spec, "drafter": {"models": models}})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    jobs = sorted(job["metadata"]["name"] for job in world.cluster.of(JOB))
    assert len(jobs) == 2, "both are looked into at once"
    target = tiny_facts.architecture
    read = read_drafter(Path(__file__).parents[1] / "models" / "gemma4-tiny-keqv-dflash")
    update = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "taps": (0,), "mask_token_id": 3}
    dflash = read.model_copy(update={**update, "num_target_layers": target.num_hidden_layers})
    block = AssistantFacts(assistant=dflash, weight_bytes=300_000)
    by_directory = {"/models/mtp": assistant, "/models/dflash": block}
    for name in jobs:
        job = world.cluster.objects[JOB, "ml", name]
        (inspect,) = job["spec"]["template"]["spec"]["containers"]
        (facts,) = (each for directory, each in by_directory.items() if directory in inspect["command"])
        world.cluster.end_job(message=facts.model_dump_json(by_alias=True), name=name)
        world.settle()
    assert world.cluster.of(JOB) == []
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert _settings(world, "tiny").drafters == ("/drafter/mtp", "/drafter/dflash")
    pod = _template(world, "tiny")
    assert [v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v].count("drafter") == 1
    (worker,) = pod["containers"]
    assert [mount["mountPath"] for mount in worker["volumeMounts"]].count("/drafter") == 1
    world.rest()
    world.restart_operator()
    world.settle()
    assert world.rest() == [], "what was read is kept"


def test_volumes_of_drafters_are_shared_where_they_are_the_same() -> None:
    def source(uri: str, claim: str | None = None) -> ModelSource:
        revision = "main" if uri.startswith("hf://") else None
        return ModelSource(uri, revision, claim, f"/models/{uri.rsplit('/', 1)[1]}", None)

    model, scratch, other = source("pvc://a/model", "a"), source("hf://o/d"), source("hf://o/e")
    first = scratch.beside(model)
    assert (first.volume, first.directory) == ("drafter", "/drafter/d")
    second = other.beside(model, first)
    assert (second.volume, second.directory) == ("drafter", "/drafter/e"), "scratch space is one"
    third = source("pvc://b/f", "b").beside(model, first)
    assert (third.volume, third.directory, third.mount_path) == ("drafter-2", "/drafter-2/f", "/drafter-2")
    again = source("pvc://a/g", "a").beside(model, first)
    assert (again.volume, again.directory) == ("weights", "/models/g")


def test_what_workers_measured_of_each_of_two_is_learned(gpus) -> None:
    spec = {"model": {"uri": "hf://google/gemma-4-31B-it"}, "drafter": BOTH, "workload": {"concurrency": 2}}
    gpus.create(spec, name="big")
    plan = PlanStatus.model_validate(gpus.status("big")["plan"])
    told = MeasuredDrafts(acceptance=0.6, acceptances=(0.7, None))
    report = WorkerReport(1024, None, None, drafts=told)
    assert acceptance_of(report, plan, "hf://m") == {pair_of("hf://m", "hf://google/gemma-4-31B-it-assistant"): 0.7}
    alone = WorkerReport(1024, None, None, drafts=MeasuredDrafts(acceptance=0.6))
    assert acceptance_of(alone, plan, "hf://m") == {}, "a worker that goes without one of them"
