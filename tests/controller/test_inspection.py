"""The inspect Job is treated as a worker is: what keeps it is said, and what failed is tried again with backoff."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, EVENT, JOB, POD

Body = dict[str, Any]
QUOTA = 'Error creating: pods "tiny-inspect-x" is forbidden: exceeded quota: small, requested: pods=1, limited: pods=0'
MISSING = TerminationMessage(reason=TerminationReason.InvalidCheckpoint, message="config.json is not there.").encode()


@pytest.fixture
def inspecting(ready_world, tiny_spec: Body):
    """A healthy bystander `tiny`, and `next`, whose model is being read."""
    ready_world.pass_time(600)  # the fake API server's objects are as old as it is
    ready_world.create({**tiny_spec, "model": {"uri": "pvc://weights/next"}}, name="next")
    assert ready_world.condition("Planned", "next") == ("Unknown", "InspectingModel")
    return ready_world


@pytest.fixture(autouse=True)
def bystander(inspecting):
    """Whatever becomes of `next`, `tiny` serves on with the pod that it has."""
    (pod,) = inspecting.cluster.pods_of(inspecting.deployment_of("tiny"))
    yield
    assert inspecting.cluster.pods_of(inspecting.deployment_of("tiny")) == [pod]
    assert inspecting.condition("Ready") == ("True", "RolledOut")


def _job(world) -> Body:
    (job,) = world.cluster.of(JOB)
    return job


def _refuse_pods(world) -> None:
    """A quota without room: the Job's controller makes no pod and says so in an Event."""
    world.cluster.run_controllers = lambda: None
    for pod in world.cluster.pods_of(_job(world)):
        world.cluster.remove(POD, "ml", pod["metadata"]["name"])
    uid = _job(world)["metadata"]["uid"]
    event = {"type": "Warning", "reason": "FailedCreate", "message": QUOTA, "lastTimestamp": "2026-01-01T00:10:00Z"}
    world.cluster.happenings[uid] = [event]


def test_a_quota_that_lets_no_pod_in_is_said(inspecting) -> None:
    _refuse_pods(inspecting)
    inspecting.settle()
    inspecting.pass_time(31)
    assert inspecting.condition("Stalled", "next") == ("True", "QuotaExceeded")
    assert inspecting.condition("Ready", "next") == ("False", "QuotaExceeded")
    assert "exceeded quota: small" in inspecting.message("Stalled", "next")
    assert [event["reason"] for event in inspecting.cluster.events].count("QuotaExceeded") == 1
    inspecting.cluster._make_pod(
        _job(inspecting), {"batch.kubernetes.io/job-name": _job(inspecting)["metadata"]["name"]}
    )
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None, "there is room now"
    assert inspecting.condition("Reconciling", "next") == ("True", "InspectingModel")


def test_a_job_without_a_pod_is_said_also_where_events_cannot_be_read(inspecting, caplog) -> None:
    inspecting.cluster.refused_kinds[EVENT] = 403
    _refuse_pods(inspecting)
    inspecting.settle()
    inspecting.pass_time(31)
    assert inspecting.condition("Stalled", "next") == ("True", "PodNotStarting")
    assert f"kubectl describe job {_job(inspecting)['metadata']['name']}" in inspecting.message("Stalled", "next")
    inspecting.pass_time(61)
    inspecting.pass_time(61)
    assert caplog.text.count("Events cannot be read") == 1


def test_an_image_that_cannot_be_pulled_is_said(inspecting) -> None:
    (pod,) = inspecting.cluster.pods_of(_job(inspecting))
    since = inspecting.now.isoformat().replace("+00:00", "Z")
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    inspecting.cluster.set_pod(
        pod,
        phase="Pending",
        conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": since}],
        containerStatuses=[{"name": "inspect", "state": waits}],
    )
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None
    inspecting.pass_time(301)
    assert inspecting.condition("Stalled", "next") == ("True", "ImagePullFailed")
    assert "no such image" in inspecting.message("Stalled", "next")


def test_a_mount_that_fails_is_said(inspecting) -> None:
    (pod,) = inspecting.cluster.pods_of(_job(inspecting))
    since = inspecting.now.isoformat().replace("+00:00", "Z")
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    creating = {"name": "inspect", "state": {"waiting": {"reason": "ContainerCreating"}}}
    inspecting.cluster.set_pod(pod, phase="Pending", conditions=[scheduled], containerStatuses=[creating])
    event = {"type": "Warning", "reason": "FailedMount", "message": "claim weights: no such path"}
    inspecting.cluster.happenings[pod["metadata"]["uid"]] = [event]
    inspecting.settle()
    inspecting.pass_time(61)
    assert inspecting.condition("Stalled", "next") == ("True", "PodNotStarting")
    assert "claim weights: no such path" in inspecting.message("Stalled", "next")


def _fail(world) -> None:
    world.cluster.end_job(message=MISSING, exit_code=TERMINAL_EXIT_CODE)
    world.settle()


def test_a_model_that_comes_after_its_model_serve_is_found(inspecting, tiny_facts: ModelFacts) -> None:
    """In GitOps the download and the ModelServe are applied together."""
    waited = []
    for _ in range(7):
        _fail(inspecting)
        assert inspecting.condition("Stalled", "next") == ("True", "InvalidCheckpoint")
        failed = _job(inspecting)["metadata"]["uid"]
        (key,) = [key for key in inspecting.due if key.name == "next"]
        delay = inspecting.due[key] - inspecting.now
        inspecting.pass_time(delay.total_seconds() - 1)
        assert _job(inspecting)["metadata"]["uid"] == failed, "not before its time"
        inspecting.pass_time(1)
        assert _job(inspecting)["metadata"]["uid"] != failed
        waited.append(round(delay / timedelta(minutes=1)))
    assert waited == [1, 2, 4, 8, 16, 30, 30]
    inspecting.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    inspecting.settle()
    assert inspecting.condition("Planned", "next") == ("True", "PlanCommitted")
    assert inspecting.cluster.of(JOB) == []


def test_who_asks_has_the_model_read_again_at_once(inspecting) -> None:
    _fail(inspecting)
    failed = _job(inspecting)["metadata"]["uid"]
    inspecting.restart_operator()
    inspecting.settle()
    assert _job(inspecting)["metadata"]["uid"] == failed, "a restart is no reason"
    inspecting.ask_for_a_retry("1", name="next")
    assert _job(inspecting)["metadata"]["uid"] != failed
    _fail(inspecting)
    assert labels.annotation_of(_job(inspecting), labels.RETRY) == "1"
    inspecting.rest()
    inspecting.pending = inspecting.gatherer.known_keys()
    inspecting.settle()
    assert inspecting.rest() == [], "asked once, tried once"


def test_pods_of_the_job_before_say_nothing_of_the_next(inspecting) -> None:
    _fail(inspecting)
    (old,) = inspecting.cluster.pods_of(_job(inspecting))
    inspecting.pass_time(61)
    inspecting.cluster.put(POD, {**old, "metadata": {**old["metadata"], "name": "left-behind"}})  # not collected yet
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") is None
    assert inspecting.condition("Planned", "next") == ("Unknown", "InspectingModel")


# --- Jobs that would run for ever -----------------------------------------------------------------------------------


def _pod(world) -> Body:
    (pod,) = world.cluster.pods_of(_job(world))
    return pod


def _beside_a_sidecar(world, *, exit_code: int, message: str) -> None:
    """`inspect` has ended, and a container that a webhook added goes on."""
    at = world.now.isoformat().replace("+00:00", "Z")
    ended = {"terminated": {"exitCode": exit_code, "message": message, "finishedAt": at}}
    sidecar = {"name": "istio-proxy", "state": {"running": {"startedAt": at}}, "ready": True}
    inspect = {"name": "inspect", "state": ended}
    world.cluster.set_pod(_pod(world), phase="Running", containerStatuses=[sidecar, inspect])
    world.settle()


def _exceed_the_deadline(world) -> None:
    """As the Job's controller does: it deletes the pods, and the Job has failed once they have gone."""
    for pod in world.cluster.pods_of(_job(world)):
        world.cluster.change(
            POD, pod["metadata"]["name"], lambda body: body["metadata"].update(deletionTimestamp="2026-01-01T00:20:00Z")
        )
    at = world.now.isoformat(timespec="seconds")
    failed = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": at}
    world.cluster.run_controllers = lambda: None
    world.cluster.change(
        JOB, _job(world)["metadata"]["name"], lambda body: body.update(status={"conditions": [failed]})
    )
    world.settle()


def test_what_was_read_counts_though_a_sidecar_keeps_the_pod(inspecting, tiny_facts: ModelFacts) -> None:
    _beside_a_sidecar(inspecting, exit_code=0, message=tiny_facts.model_dump_json(by_alias=True))
    assert inspecting.condition("Planned", "next") == ("True", "PlanCommitted")
    assert inspecting.cluster.of(JOB) == [], "and the Job goes, its pod with it"


def test_an_end_for_good_is_said_at_once_though_a_sidecar_keeps_the_pod(inspecting) -> None:
    _beside_a_sidecar(inspecting, exit_code=TERMINAL_EXIT_CODE, message=MISSING)
    assert inspecting.condition("Stalled", "next") == ("True", "InvalidCheckpoint")
    failed = _job(inspecting)["metadata"]["uid"]
    inspecting.pass_time(61)
    assert _job(inspecting)["metadata"]["uid"] != failed, "and tried again with backoff"
    assert labels.annotation_of(_job(inspecting), labels.ATTEMPTS) == "2"


def test_another_bad_end_beside_a_sidecar_is_said_after_a_moment(inspecting) -> None:
    _beside_a_sidecar(inspecting, exit_code=137, message="killed")
    assert inspecting.condition("Stalled", "next") is None, "its pod may yet end, and the Job try again"
    inspecting.pass_time(61)
    assert inspecting.condition("Stalled", "next") == ("True", "InspectionFailed")
    assert "last exit code 137: killed; containers beside it" in inspecting.message("Stalled", "next")
    failed = _job(inspecting)["metadata"]["uid"]
    inspecting.pass_time(61)
    assert _job(inspecting)["metadata"]["uid"] != failed


def test_a_job_that_does_not_end_has_a_deadline_and_the_next_waits_for_its_pod(inspecting) -> None:
    assert _job(inspecting)["spec"]["activeDeadlineSeconds"] == 600
    _exceed_the_deadline(inspecting)
    assert inspecting.condition("Planned", "next") == ("False", "InspectionFailed")
    assert inspecting.condition("Stalled", "next") == ("True", "InspectionFailed")
    name, failed = _pod(inspecting)["metadata"]["name"], _job(inspecting)["metadata"]["uid"]
    told = inspecting.message("Stalled", "next")
    assert "did not end within 600 s" in told
    assert f"once its pod {name} has ended" in told
    assert [event["reason"] for event in inspecting.cluster.events].count("InspectionFailed") == 1
    for _ in range(100):
        inspecting.pass_time(61)
    assert _job(inspecting)["metadata"]["uid"] == failed, "a volume that hangs gets no second pod"
    del inspecting.cluster.run_controllers  # they work again
    inspecting.cluster.remove(POD, "ml", name)
    inspecting.settle()
    assert _job(inspecting)["metadata"]["uid"] != failed
    assert inspecting.condition("Stalled", "next") is None


def test_who_asks_has_another_pod_made_beside_one_that_hangs(inspecting) -> None:
    _exceed_the_deadline(inspecting)
    failed = _job(inspecting)["metadata"]["uid"]
    inspecting.ask_for_a_retry("1", name="next")
    assert _job(inspecting)["metadata"]["uid"] != failed


def test_an_operator_that_starts_anew_goes_on_where_it_was(inspecting) -> None:
    running = _job(inspecting)["metadata"]["uid"]
    inspecting.restart_operator()
    inspecting.settle()
    assert _job(inspecting)["metadata"]["uid"] == running
    _exceed_the_deadline(inspecting)
    told = inspecting.message("Stalled", "next")
    inspecting.restart_operator()
    inspecting.settle()
    assert inspecting.message("Stalled", "next") == told


def test_a_suspended_job_is_said(inspecting) -> None:
    _refuse_pods(inspecting)
    suspended = {"type": "Suspended", "status": "True", "reason": "JobSuspended"}

    def suspend(body: Body) -> None:
        body["spec"]["suspend"] = True
        body["status"] = {"conditions": [suspended]}

    inspecting.cluster.change(JOB, _job(inspecting)["metadata"]["name"], suspend)
    inspecting.settle()
    assert inspecting.condition("Stalled", "next") == ("True", "WaitingForQuota")
    assert "names no queue" in inspecting.message("Stalled", "next")
    assert "spec.pod.labels (kueue.x-k8s.io/queue-name)" in inspecting.message("Stalled", "next")
    before = _job(inspecting)["metadata"]["uid"]
    inspecting.edit("next", pod={"labels": {"kueue.x-k8s.io/queue-name": "gpus", "team": "a"}})
    assert _job(inspecting)["metadata"]["uid"] != before, "an edit of pods has it made anew"
    own = _job(inspecting)["metadata"]["labels"]
    assert own["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "team" not in own
    inspecting.cluster.change(JOB, _job(inspecting)["metadata"]["name"], suspend)
    inspecting.settle()
    inspecting.pass_time(31)
    assert inspecting.condition("Stalled", "next") is None
    assert inspecting.condition("Planned", "next") == ("Unknown", "InspectingModel")
    assert "waits in Kueue's queue gpus for quota" in inspecting.message("Planned", "next")


def test_what_the_spec_adds_to_pods_reaches_the_jobs(inspecting) -> None:
    pod = {
        "labels": {"sidecar.istio.io/inject": "false", "serving.modelserve.dev/name": "forged"},
        "annotations": {"linkerd.io/inject": "disabled"},
        "runtimeClassName": "gvisor",
        "priorityClassName": "high",
        "serviceAccountName": "reader",
        "tolerations": [{"key": "team", "operator": "Exists"}],
    }
    inspecting.edit("next", pod=pod)
    template = _job(inspecting)["spec"]["template"]
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert template["metadata"]["labels"]["serving.modelserve.dev/name"] == "next", "ours win"
    assert template["metadata"]["annotations"] == pod["annotations"]
    given = {key: template["spec"][key] for key in ("runtimeClassName", "priorityClassName", "serviceAccountName")}
    assert given == {key: pod[key] for key in given}
    assert template["spec"]["tolerations"][0]["key"] == "team"
    assert template["spec"]["readinessGates"], "no Service over such labels takes it for a worker"


def test_a_runtime_of_gpu_nodes_does_not_reach_a_pod_without_gpus(inspecting) -> None:
    inspecting.edit("next", pod={"runtimeClassName": "nvidia-cdi"})
    assert "runtimeClassName" not in _job(inspecting)["spec"]["template"]["spec"]


def test_an_edit_that_makes_no_other_job_leaves_it_alone(inspecting) -> None:
    running = _job(inspecting)["metadata"]["uid"]
    inspecting.edit("next", replicas=2, context={"maxModelLen": 1024})
    assert _job(inspecting)["metadata"]["uid"] == running


def test_a_job_of_an_earlier_release_is_left_alone(inspecting) -> None:
    def as_before(body: Body) -> None:
        del body["metadata"]["annotations"][labels.MADE_FROM]

    inspecting.cluster.change(JOB, _job(inspecting)["metadata"]["name"], as_before)
    running = _job(inspecting)["metadata"]["uid"]
    inspecting.edit("next", pod={"labels": {"a": "b"}})
    assert _job(inspecting)["metadata"]["uid"] == running


def test_facts_of_a_release_that_did_not_look_for_images_are_read_anew(inspecting, tiny_facts: ModelFacts) -> None:
    """Once their ConfigMap is deleted, as the message says; until then images are refused, and text is served on."""
    inspecting.cluster.end_job(
        message=tiny_facts.model_dump_json(by_alias=True), name=_job(inspecting)["metadata"]["name"]
    )
    inspecting.settle()
    inspecting.make_ready()
    inspecting.edit("next", modalities={"image": {"perRequest": 1, "maxSoftTokens": 70}})
    assert inspecting.condition("Accepted", "next") == ("False", "InvalidSpec")
    assert "delete the ConfigMap NAME-model-... to have it read anew" in inspecting.message("Accepted", "next")
    held = next(
        each for each in inspecting.cluster.of(CONFIG_MAP) if each["metadata"]["name"].startswith("next-model-")
    )
    inspecting.cluster.remove(CONFIG_MAP, "ml", held["metadata"]["name"])
    inspecting.settle()
    assert inspecting.condition("Planned", "next") == ("Unknown", "InspectingModel")
    sees = ImageArchitecture(patch_side=48, embed_size=64, positions=1120, mutual=True)
    facts = tiny_facts.model_copy(update={"images": sees})
    inspecting.cluster.end_job(message=facts.model_dump_json(by_alias=True), name=_job(inspecting)["metadata"]["name"])
    inspecting.settle()
    assert inspecting.condition("Accepted", "next") == ("True", "Valid")
    assert inspecting.condition("Planned", "next")[0] == "True"
