"""ModelCaches: fetched once for many ModelServes, followed, repaired, refused with a remedy, freed when nobody reads
them. Volumes and the Jobs that fill them are fakes that do what the real ones do.
"""

from __future__ import annotations

from typing import Any

import pytest
from cache_volumes import (
    BYTES,
    FIRST,
    SECOND,
    URI,
    CacheVolumes,
    cache,
    condition,
    edit,
    look_again,
    message,
    shown,
    wait,
)

from modelserve.caches.model_cache import ModelCacheSpec
from modelserve.caches.reports import CacheFailure
from modelserve.errors import InvalidInput
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, CONTROLLER_REVISION, DEPLOYMENT, JOB, MODEL_CACHE, MODEL_SERVE, POD
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.process.metrics import REGISTRY
from modelserve_operator.settings import Settings

HELD = "serving.modelserve.dev/free"


@pytest.fixture
def volumes(world: Any) -> CacheVolumes:
    """A cluster with the CRD, and a claim that pods share."""
    world.cluster.put(CLAIM, {
        "metadata": {"name": "weights", "namespace": "ml"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {},
    })  # fmt: skip
    world.serve(MODEL_CACHE)
    return CacheVolumes(world)


def _spec(tiny_spec: dict[str, Any], name: str = "gemma", **model: Any) -> dict[str, Any]:
    return {**tiny_spec, "model": {"uri": URI, "cache": {"name": name}, **model}}


def _inspect(world: Any, facts: Any) -> None:
    """Every inspection that runs ends well."""
    for job in world.cluster.of(JOB):
        if labels.label_of(job, labels.COMPONENT) == labels.INSPECTION and not job.get("status"):
            world.cluster.end_job(message=facts.model_dump_json(by_alias=True), name=job["metadata"]["name"])
    world.settle()


def _serve(world: Any, volumes: CacheVolumes, facts: Any, spec: dict[str, Any], name: str = "tiny") -> None:
    """A ModelServe that reads the cache, Ready."""
    world.create(spec, name=name)
    wait(world, volumes)
    _inspect(world, facts)
    world.make_ready()
    assert world.condition("Ready", name) == ("True", "RolledOut")


def test_a_cache_is_filled_once_and_says_what_it_holds(volumes, world) -> None:
    cache(world, "gemma", secretRef={"name": "hub"}, pod={"env": [{"name": "HF_ENDPOINT", "value": "https://m"}]})
    world.settle()
    assert condition(world, "gemma") == ("False", "Fetching")
    assert condition(world, "gemma", "Reconciling") == ("True", "Fetching")
    assert world.cluster.objects[MODEL_CACHE, "ml", "gemma"]["metadata"]["finalizers"] == [HELD]
    (job,) = volumes.running()
    pod = job["spec"]["template"]["spec"]
    (fetch,) = pod["containers"]
    told = {each["name"]: each for each in fetch["env"]}
    assert told["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert told["HF_ENDPOINT"]["value"] == "https://m"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    wait(world, volumes)
    status = shown(world, "gemma")
    assert condition(world, "gemma") == ("True", "Filled")
    assert [each["type"] for each in status["conditions"]] == ["Ready", "Accepted"], "kstatus: nothing is on its way"
    filled = status["filled"]
    assert (filled["commit"], filled["bytes"], filled["held"]) == (FIRST, BYTES, [FIRST])
    assert (status["claimName"], status["progress"], status["users"]) == ("weights", "19.3 GB", 0)
    assert world.cluster.of(JOB) == [], "its answer is in the status"
    world.rest()
    wait(world, volumes, seconds=301.0)
    world.restart_operator()
    wait(world, volumes)
    assert (world.rest(), volumes.fetched) == ([], [("/models/modelserve-caches/gemma", FIRST)])
    states = ({"state": each} for each in ("there", "filled"))
    assert [REGISTRY.get_sample_value("modelserve_operator_caches", each) for each in states] == [1, 1]


def test_progress_is_what_the_fetching_pod_tells(volumes, world) -> None:
    cache(world, "gemma")
    world.settle()
    (job,) = volumes.running()
    (pod,) = world.cluster.pods_of(job)
    world.cluster.set_pod(pod, phase="Running", podIP="10.0.0.9")
    told = {"commit": FIRST, "bytes": 8_100_000_000, "totalBytes": BYTES, "bytesPerSecond": 100_000_000,
            "secondsLeft": 112, "later": 1}  # fmt: skip
    world.cluster.worker_plans[pod["metadata"]["name"]] = told
    world.pass_time(4.0)
    status = shown(world, "gemma")
    assert status["progress"] == "41 % of 19.3 GB"
    assert status["fetch"] == {key: value for key, value in told.items() if key != "later"}
    assert "112 s left" in message(world, "gemma")
    volumes.run()
    wait(world, volumes)
    assert "fetch" not in shown(world, "gemma")


@pytest.mark.parametrize("late", [False, True])
def test_eight_model_serves_of_one_model_fetch_it_once_and_mount_it(
    volumes, world, tiny_spec, tiny_facts, late: bool
) -> None:
    """`late`: an event of what the operator wrote comes after the answer, and is an echo."""
    world.events_wait = late
    cache(world, "gemma")
    names = [f"m{number}" for number in range(8)]
    for name in names:
        world.create(_spec(tiny_spec), name=name)
        assert world.condition("Planned", name) == ("Unknown", "WaitingForCache")
        assert "is not filled yet" in world.message("Planned", name)
        assert world.condition("Stalled", name) is None
    assert world.cluster.of(DEPLOYMENT) == []
    wait(world, volumes)
    _inspect(world, tiny_facts)
    world.make_ready()
    assert {world.condition("Ready", name) for name in names} == {("True", "RolledOut")}
    assert volumes.fetched == [("/models/modelserve-caches/gemma", FIRST)]
    assert shown(world, "gemma")["users"] == 8
    for name in names:
        pod = world.deployment_of(name)["spec"]["template"]["spec"]
        assert "initContainers" not in pod, "nothing is fetched"
        (volume,) = (each for each in pod["volumes"] if each["name"] == "weights")
        assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
        (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "weights")
        assert mount["readOnly"] is True
        engine = world.cluster.objects[CONTROLLER_REVISION, "ml", f"{name}-{world.revision(name)}"]["data"]["engine"]
        assert engine["model"] == f"/models/modelserve-caches/gemma/{FIRST}"


def test_a_branch_that_moved_is_fetched_beside_and_the_old_one_goes(volumes, world, tiny_spec, tiny_facts) -> None:
    cache(world, "gemma", refreshMinutes=10)
    _serve(world, volumes, tiny_facts, {**_spec(tiny_spec), "revisionHistoryLimit": 0})
    before = world.revision()
    volumes.commits["main"] = SECOND
    wait(world, volumes, seconds=150.0, times=5)
    assert shown(world, "gemma")["filled"]["commit"] == SECOND
    assert volumes.commits_of("gemma") == {FIRST, SECOND}, "workers that run read the first"
    assert "RevisionMoved" in [event["reason"] for event in world.cluster.events]
    _inspect(world, tiny_facts)
    world.settle()
    assert world.revision() != before
    assert before in world.deployments(), "the old one serves until the new one is ready"
    wait(world, volumes)
    assert volumes.commits_of("gemma") == {FIRST, SECOND}
    world.make_ready()
    wait(world, volumes, seconds=301.0, times=4)
    assert list(world.deployments()) == [world.revision()]
    assert volumes.commits_of("gemma") == {SECOND}
    assert shown(world, "gemma")["filled"]["held"] == [SECOND]
    assert volumes.fetched == [("/models/modelserve-caches/gemma", each) for each in (FIRST, SECOND)]
    assert world.condition("Ready") == ("True", "RolledOut")


def test_somebody_who_asks_has_every_file_verified(volumes, world) -> None:
    cache(world, "gemma")
    wait(world, volumes)
    assert volumes.verified == []
    look_again(world, "gemma")
    wait(world, volumes)
    assert (volumes.verified, len(volumes.fetched)) == ([FIRST], 1)
    wait(world, volumes, seconds=301.0)
    assert volumes.verified == [FIRST], "once"


@pytest.mark.parametrize("reason", list(CacheFailure))
def test_what_another_try_does_not_cure_is_said_and_tried_again_later(volumes, world, reason: CacheFailure) -> None:
    volumes.broken["gemma"] = reason
    cache(world, "gemma")
    cache(world, "bystander")
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", reason)
    assert condition(world, "gemma", "Stalled") == ("True", reason)
    assert f"{reason} happened" in message(world, "gemma")
    assert "tried again at" in message(world, "gemma")
    assert condition(world, "bystander") == ("True", "Filled")
    tries = volumes.tasks.count("fill")
    wait(world, volumes, seconds=10.0, times=3)
    assert volumes.tasks.count("fill") == tries, "not before its time"
    wait(world, volumes, seconds=61.0, times=3)
    assert volumes.tasks.count("fill") in (tries + 1, tries + 2), "each time later"
    del volumes.broken["gemma"]
    look_again(world, "gemma")
    wait(world, volumes)
    assert condition(world, "gemma") == ("True", "Filled")
    assert world.cluster.of(JOB) == []


def test_a_job_that_ends_without_a_reason_is_no_stall(volumes, world) -> None:
    volumes.broken["gemma"] = ""
    cache(world, "gemma")
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "FetchFailed")
    assert condition(world, "gemma", "Reconciling") == ("True", "FetchFailed")


def test_a_cache_that_goes_bad_hurts_nobody_who_reads_it(volumes, world, tiny_spec, tiny_facts) -> None:
    cache(world, "gemma")
    _serve(world, volumes, tiny_facts, _spec(tiny_spec))
    deployment = world.deployment_of("tiny")
    volumes.broken["gemma"] = CacheFailure.ACCESS_DENIED
    volumes.commits["main"] = SECOND
    look_again(world, "gemma")
    wait(world, volumes)
    assert condition(world, "gemma") == ("True", "AccessDenied"), "what is there is read"
    assert world.condition("Ready") == ("True", "RolledOut")
    # Somebody wipes the status, and the cache is fetched anew; meanwhile its commit is not known.
    world.cluster.change(MODEL_CACHE, "gemma", lambda body: body.update(status={}))
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "AccessDenied")
    assert world.condition("Ready") == ("True", "RolledOut")
    world.edit(replicas=2)
    world.make_ready()
    assert world.deployments() == {world.revision(): 2}, "it scales on what is committed"
    assert world.deployment_of("tiny")["spec"]["template"] == deployment["spec"]["template"]
    assert "is not filled" in world.message("Planned")


@pytest.mark.parametrize(("model", "said"), [
    ({"uri": "hf://team/other"}, "has uri hf://team/model"), ({"revision": "v2"}, "has revision main"),
])  # fmt: skip
def test_a_cache_of_another_model_is_refused_by_name(volumes, world, tiny_spec, model, said: str) -> None:
    cache(world, "gemma")
    wait(world, volumes)
    world.create(_spec(tiny_spec, **model))
    assert world.condition("Planned") == ("False", "CacheMismatch")
    assert world.condition("Stalled") == ("True", "CacheMismatch")
    assert said in world.message("Planned")


def test_a_cache_that_is_not_there_is_waited_for(volumes, world, tiny_spec, tiny_facts) -> None:
    world.create(_spec(tiny_spec))
    assert world.condition("Planned") == ("Unknown", "CacheNotFound")
    cache(world, "gemma")
    wait(world, volumes)
    _inspect(world, tiny_facts)
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")


def test_an_installation_that_keeps_none_says_so(world, tiny_spec) -> None:
    world.create(_spec(tiny_spec))
    assert world.condition("Planned") == ("False", "CacheNotFound")
    assert "modelCaches.enabled" in world.message("Planned")


def test_a_claim_is_made_and_goes_with_its_cache(volumes, world, tiny_spec, tiny_facts) -> None:
    volume = {"size": "80Gi", "storageClassName": "fast", "accessModes": ["ReadWriteMany"]}
    cache(world, "gemma", storage={"volume": volume})
    world.settle()
    made = world.cluster.objects[CLAIM, "ml", "gemma-cache"]
    assert made["spec"]["resources"]["requests"]["storage"] == "80Gi"
    assert made["spec"]["storageClassName"] == "fast"
    wait(world, volumes)
    assert condition(world, "gemma") == ("True", "Filled")
    _serve(world, volumes, tiny_facts, _spec(tiny_spec))
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "InUse")
    assert "tiny" in message(world, "gemma")
    assert (CLAIM, "ml", "gemma-cache") in world.cluster.objects
    world.cluster.remove(MODEL_SERVE, "ml", "tiny")
    wait(world, volumes, seconds=11.0)
    assert world.cluster.of(MODEL_CACHE) == []
    assert (CLAIM, "ml", "gemma-cache") not in world.cluster.objects


def test_a_claim_of_somebody_else_is_not_taken(volumes, world) -> None:
    world.cluster.put(CLAIM, {"metadata": {"name": "gemma-cache", "namespace": "ml"}, "spec": {}, "status": {}})
    cache(world, "gemma", storage={"volume": {"size": "80Gi"}})
    wait(world, volumes)
    assert condition(world, "gemma", "Stalled") == ("True", "NameConflict")
    assert volumes.tasks == []
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    wait(world, volumes)
    assert (CLAIM, "ml", "gemma-cache") in world.cluster.objects


def test_a_claim_that_is_not_there_is_named(volumes, world) -> None:
    cache(world, "gemma", storage={"persistentVolumeClaim": {"name": "later"}})
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "ClaimNotFound")
    world.cluster.put(CLAIM, {"metadata": {"name": "later", "namespace": "ml"}, "spec": {}, "status": {}})
    wait(world, volumes, seconds=11.0)
    assert condition(world, "gemma") == ("True", "Filled")


def test_deletion_waits_for_readers_and_then_frees_its_bytes_alone(volumes, world, tiny_spec, tiny_facts) -> None:
    cache(world, "gemma")
    cache(world, "bystander")
    _serve(world, volumes, tiny_facts, _spec(tiny_spec))
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    wait(world, volumes, seconds=11.0)
    assert condition(world, "gemma") == ("False", "InUse")
    assert volumes.commits_of("gemma") == {FIRST}
    world.edit(model={"uri": "pvc://weights/tiny"})  # pods that read it run on until new ones are ready
    wait(world, volumes, seconds=11.0)
    assert condition(world, "gemma") == ("False", "InUse")
    _inspect(world, tiny_facts)
    world.make_ready()
    wait(world, volumes, seconds=11.0, times=8)
    assert [body["metadata"]["name"] for body in world.cluster.of(MODEL_CACHE)] == ["bystander"]
    assert (volumes.commits_of("gemma"), volumes.commits_of("bystander")) == (set(), {FIRST})
    assert volumes.tasks[-1] == "free"
    assert world.condition("Ready") == ("True", "RolledOut")


def test_bytes_that_cannot_be_freed_are_told_and_tried_again(volumes, world) -> None:
    cache(world, "gemma")
    wait(world, volumes)
    volumes.broken["gemma"] = ""
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "FreeFailed")
    assert condition(world, "gemma", "Stalled") == ("True", "FreeFailed")
    assert HELD in message(world, "gemma")
    del volumes.broken["gemma"]
    wait(world, volumes, seconds=61.0)
    assert world.cluster.of(MODEL_CACHE) == []
    assert volumes.commits_of("gemma") == set()


def test_a_namespace_that_goes_is_held_by_nothing(volumes, world) -> None:
    cache(world, "gemma")
    wait(world, volumes)

    def refuse(kind: Any, body: dict[str, Any]) -> None:
        if kind is JOB:
            raise KubeError(403, "jobs is forbidden: unable to create new content in namespace ml because it is being "
                                 "terminated")  # fmt: skip

    world.cluster.admission = refuse
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    wait(world, volumes)
    assert world.cluster.of(MODEL_CACHE) == []
    assert "FreeAbandoned" in [event["reason"] for event in world.cluster.events]


def test_a_job_that_is_refused_is_said_and_hurts_no_other(volumes, world) -> None:
    def refuse(kind: Any, body: dict[str, Any]) -> None:
        if kind is JOB and labels.label_of(body, labels.CACHE) == "gemma":
            raise KubeError(403, "a policy says no")

    world.cluster.admission = refuse
    cache(world, "gemma")
    cache(world, "other")
    wait(world, volumes)
    assert condition(world, "gemma") == ("False", "WriteRefused")
    assert "a policy says no" in message(world, "gemma")
    assert condition(world, "other") == ("True", "Filled")
    world.cluster.admission = None
    wait(world, volumes, seconds=31.0)
    assert condition(world, "gemma") == ("True", "Filled")


def test_as_many_are_fetched_at_a_time_as_the_installation_allows(volumes, world) -> None:
    world.settings = Settings(worker_image="worker:test", cache_fetches=2)
    world.restart_operator()
    for number in range(5):
        cache(world, f"c{number}")
    world.settle()
    assert len(volumes.running()) == 2
    assert sorted(condition(world, f"c{number}")[1] for number in range(5)) == ["Fetching"] * 2 + ["Queued"] * 3
    for _ in range(4):
        volumes.run()
        world.pass_time(11.0)
        assert len(volumes.running()) <= 2
    assert {condition(world, f"c{number}") for number in range(5)} == {("True", "Filled")}


def test_jobs_that_free_keep_no_other_from_being_fetched(volumes, world) -> None:
    world.settings = Settings(worker_image="worker:test", cache_fetches=1)
    world.restart_operator()
    cache(world, "gone")
    wait(world, volumes)
    world.cluster.remove(MODEL_CACHE, "ml", "gone")
    world.settle()
    assert [labels.label_of(job, labels.CACHE_TASK) for job in volumes.running()] == ["free"]
    cache(world, "gemma")
    world.settle()
    assert condition(world, "gemma") == ("False", "Fetching")
    assert len(volumes.running()) == 2


def test_why_a_pod_does_not_start_is_said(volumes, world) -> None:
    def say_it_has_no_node(task: str) -> None:
        world.settle()
        (job,) = volumes.running()
        assert labels.label_of(job, labels.CACHE_TASK) == task
        (pod,) = world.cluster.pods_of(job)
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
        world.cluster.set_pod(pod, phase="Pending", conditions=[waits])
        world.settle()
        assert "0/3 nodes fit" in message(world, "gemma")

    cache(world, "gemma")
    say_it_has_no_node("fill")
    wait(world, volumes)
    world.cluster.remove(MODEL_CACHE, "ml", "gemma")
    say_it_has_no_node("free")
    wait(world, volumes)
    assert world.cluster.of(MODEL_CACHE) == []


def test_another_revision_is_fetched_in_place_of_the_one_that_is_under_way(volumes, world) -> None:
    volumes.commits["v2"] = SECOND
    cache(world, "gemma")
    world.settle()
    (before,) = volumes.running()
    edit(world, "gemma", revision="v2")
    world.settle()
    (job,) = volumes.running()
    assert job["metadata"]["uid"] != before["metadata"]["uid"]
    wait(world, volumes)
    assert volumes.fetched == [("/models/modelserve-caches/gemma", SECOND)]
    assert shown(world, "gemma")["filled"]["revision"] == "v2"


def test_of_an_invalid_object_the_field_is_named(volumes, world) -> None:
    cache(world, "gemma", storage={})
    wait(world, volumes)
    assert condition(world, "gemma", "Stalled") == ("True", "InvalidSpec")
    assert "storage is one of" in message(world, "gemma")
    with pytest.raises(InvalidInput, match=r"spec\.uri"):
        ModelCacheSpec.parse({"uri": "pvc://x/y", "storage": {"persistentVolumeClaim": {"name": "c"}}})
    spec, unknown = ModelCacheSpec.parse(
        {"uri": URI, "storage": {"persistentVolumeClaim": {"name": "c"}}, "later": True}
    )
    assert (spec.connections, unknown) == (4, ("later",))


def test_a_forged_status_sends_pods_to_no_other_claim(volumes, world, tiny_spec, tiny_facts) -> None:
    cache(world, "gemma")
    wait(world, volumes)

    def forge(body: dict[str, Any]) -> None:
        body["status"]["claimName"] = "secrets-of-others"
        body["status"]["filled"]["commit"] = "../../../etc"

    world.cluster.change(MODEL_CACHE, "gemma", forge)
    world.create(_spec(tiny_spec))
    wait(world, volumes)
    _inspect(world, tiny_facts)
    world.make_ready()
    pod = str(world.deployment_of("tiny")["spec"]["template"])
    assert "secrets-of-others" not in pod
    assert "etc/" not in str(world.cluster.of(CONTROLLER_REVISION)[0]["data"]["engine"]["model"])
    assert shown(world, "gemma")["filled"]["commit"] == FIRST


class _Killed(BaseException):
    """The operator's process ends here."""


STORY = ("create", "move", "verify", "delete")


@pytest.mark.parametrize("killed_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", range(9))
def test_an_operator_that_is_killed_at_any_write_goes_on_from_the_objects(
    volumes, world, tiny_spec, tiny_facts, place: int, killed_before: bool
) -> None:
    """Each step of a cache's life with an end of the process at its `place`-th write. Whatever is left: what a status
    says is there is there, what pods read stays, and bystanders are left alone."""
    cache(world, "bystander")
    _serve(world, volumes, tiny_facts, _spec(tiny_spec, "bystander"), "reader")
    for step in STORY:
        writes = 0

        def between(request: Any) -> None:
            nonlocal writes
            if request.verb in ("apply", "json_patch", "delete"):
                writes += 1
                if writes == place + 1:
                    raise _Killed

        _step(world, volumes, step)
        setattr(world.cluster, "asked" if killed_before else "answered", between)
        try:
            wait(world, volumes)
        except _Killed:
            world.cluster.asked = world.cluster.answered = None
            _consistent(volumes, world)
            world.restart_operator()
        world.cluster.asked = world.cluster.answered = None
        for _ in range(6):
            wait(world, volumes, seconds=11.0, times=1)
            _consistent(volumes, world)
        if step == "delete":
            assert [body["metadata"]["name"] for body in world.cluster.of(MODEL_CACHE)] == ["bystander"]
            assert volumes.commits_of("gemma") == set()
        else:
            assert condition(world, "gemma") == ("True", "Filled"), step
            assert shown(world, "gemma")["filled"]["commit"] == (FIRST if step == "create" else SECOND)
            assert volumes.verified == ([SECOND] if step == "verify" else []) or step == "delete"
        assert [job for job in world.cluster.of(JOB) if labels.label_of(job, labels.CACHE)] == []
    assert [each for each in volumes.fetched if each[0].endswith("/gemma")] == [
        ("/models/modelserve-caches/gemma", each) for each in (FIRST, SECOND)
    ], "nothing is fetched twice"


def _step(world: Any, volumes: CacheVolumes, step: str) -> None:
    if step == "create":
        volumes.commits = {"main": FIRST, "v2": SECOND}
        cache(world, "gemma")
    elif step == "move":
        edit(world, "gemma", revision="v2")
    elif step == "verify":
        look_again(world, "gemma")
    else:
        world.cluster.remove(MODEL_CACHE, "ml", "gemma")


def _consistent(volumes: CacheVolumes, world: Any) -> None:
    for body in world.cluster.of(MODEL_CACHE):
        filled = (body.get("status") or {}).get("filled")
        gone = body["metadata"].get("deletionTimestamp")
        if filled and not gone:
            assert filled["commit"] in volumes.commits_of(body["metadata"]["name"])
    assert FIRST in volumes.commits_of("bystander")
    assert world.condition("Ready", "reader") == ("True", "RolledOut")
    assert len([pod for pod in world.cluster.of(POD) if labels.label_of(pod, labels.NAME) == "reader"]) == 1
