"""A ModelServe from its first apply to its last: state in, state out, against the in-memory cluster."""

from __future__ import annotations

from typing import Any

from modelserve.model.model_facts import ModelFacts
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationMessage, TerminationReason
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CHILDREN,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    MODEL_SERVE,
    POD,
    SERVICE,
)
from modelserve_operator.cluster.kube import KubeError


def test_an_unknown_model_is_inspected_planned_and_served(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    world.create(tiny_spec)
    assert world.condition("Planned") == ("Unknown", "InspectingModel")
    assert world.condition("Reconciling") == ("True", "InspectingModel")
    assert world.status()["phase"] == "Inspecting"
    (job,) = world.cluster.of(JOB)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][:3] == ["modelserve", "inspect", "/models/tiny"]
    assert world.cluster.of(DEPLOYMENT) == []

    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.cluster.of(JOB) == [], "the Job is removed once its result is stored"
    assert world.condition("Planned") == ("True", "PlanCommitted")
    plan_hash = world.revision()
    assert world.deployments() == {plan_hash: 1}
    assert world.condition("Ready") == ("False", "RollingOut")
    assert world.status()["phase"] == "Progressing"

    world.make_ready()
    status = world.status()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert f"Revision {world.status()['revision']} is rolled out" in world.message("Ready")
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Reconciling") is None
    assert world.condition("Stalled") is None
    assert (status["replicas"], status["readyReplicas"], status["maxModelLen"]) == (1, 1, 2048)
    assert status["url"] == "http://tiny.ml.svc/v1"
    assert status["observedGeneration"] == 1
    assert "calibration" not in status, "on the CPU nothing is measured"
    assert status["selector"] == "app.kubernetes.io/component=worker,serving.modelserve.dev/name=tiny"
    assert world.served_hash() == plan_hash


def test_a_second_reconcile_writes_nothing(ready_world) -> None:
    ready_world.rest()
    ready_world.pending = ready_world.gatherer.known_keys()
    ready_world.settle()
    assert ready_world.rest() == []


def test_every_child_has_a_controlling_owner_and_the_collector_takes_it(ready_world) -> None:
    cluster = ready_world.cluster
    uid = cluster.objects[MODEL_SERVE, "ml", "tiny"]["metadata"]["uid"]
    for kind in (DEPLOYMENT, SERVICE, CONFIG_MAP, DISRUPTION_BUDGET):
        for body in cluster.of(kind):
            (owner,) = body["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (uid, True, True)
    cluster.remove(MODEL_SERVE, "ml", "tiny")
    ready_world.rest()
    ready_world.settle()
    assert [body for kind in CHILDREN for body in cluster.of(kind)] == []
    assert ready_world.rest() == []


def test_changing_the_spec_makes_a_revision_that_takes_over_when_ready(ready_world) -> None:
    old = ready_world.served_hash()
    ready_world.edit(context={"maxModelLen": 1024})
    new = ready_world.revision()
    assert new != old
    assert ready_world.deployments() == {old: 1, new: 1}
    assert ready_world.served_hash() == old, "the old revision serves until the new one is ready"
    assert ready_world.condition("Ready") == ("False", "RollingOut")
    assert ready_world.condition("Available") == ("True", "Serving")
    assert ready_world.status()["observedGeneration"] == 2

    ready_world.rest()
    ready_world.cluster.make_ready(ready_world.deployment(new), max_model_len=1024)
    ready_world.settle()
    writes = ready_world.rest()
    assert writes.index(("apply", "Service", "tiny")) < writes.index(("delete", "Deployment", f"tiny-{old}"))
    assert ready_world.served_hash() == new
    assert ready_world.deployments() == {new: 1}
    assert [body["metadata"]["name"] for body in ready_world.cluster.of(CONFIG_MAP)] == sorted(
        [
            f"tiny-{new}",
            *(b["metadata"]["name"] for b in ready_world.cluster.of(CONFIG_MAP) if "-model-" in b["metadata"]["name"]),
        ]
    )
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert ready_world.status()["maxModelLen"] == 1024


def test_scaling_makes_no_revision(ready_world) -> None:
    before = ready_world.served_hash()
    ready_world.edit(replicas=3)
    assert ready_world.deployments() == {before: 3}
    assert ready_world.condition("Ready") == ("False", "RollingOut")
    ready_world.make_ready()
    assert ready_world.status()["readyReplicas"] == 3
    ready_world.edit(replicas=0)
    assert ready_world.deployments() == {before: 0}
    assert ready_world.condition("Ready") == ("True", "ScaledToZero")
    assert ready_world.condition("Available") == ("False", "ScaledToZero")


def test_a_changed_model_address_is_inspected_again(ready_world, tiny_facts: ModelFacts) -> None:
    old = ready_world.served_hash()
    ready_world.edit(model={"uri": "pvc://weights/other"})
    assert ready_world.condition("Planned") == ("Unknown", "InspectingModel")
    assert ready_world.deployments() == {old: 1}, "what serves is left alone meanwhile"
    ready_world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    ready_world.settle()
    assert len(ready_world.deployments()) == 2


def test_facts_of_another_release_are_looked_for_again(ready_world, tiny_facts: ModelFacts) -> None:
    name = next(
        body["metadata"]["name"] for body in ready_world.cluster.of(CONFIG_MAP) if "-model-" in body["metadata"]["name"]
    )
    body = ready_world.cluster.objects[CONFIG_MAP, "ml", name]
    ready_world.cluster.remove(CONFIG_MAP, "ml", name)  # it is immutable
    ready_world.cluster.put(CONFIG_MAP, {**body, "data": {"model.json": '{"layers": 6}'}})
    before = ready_world.deployments()
    ready_world.settle()
    assert len(ready_world.cluster.of(JOB)) == 1
    ready_world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    ready_world.settle()
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert ready_world.deployments() == before


def test_a_failed_inspection_stalls_with_the_reason_it_gave(world, tiny_spec: dict[str, Any]) -> None:
    world.create(tiny_spec)
    message = TerminationMessage(
        reason=TerminationReason.InvalidCheckpoint, message="model.safetensors: header cut short."
    )
    world.cluster.end_job(message=message.encode(), exit_code=TERMINAL_EXIT_CODE)
    world.settle()
    assert world.condition("Stalled") == ("True", "InvalidCheckpoint")
    assert "header cut short" in world.message("Stalled")
    assert "tried again at 2026-01-01T00:01:00Z" in world.message("Stalled")
    assert world.status()["phase"] == "Stalled"
    world.cluster.remove(JOB, "ml", world.cluster.of(JOB)[0]["metadata"]["name"])
    world.settle()
    assert world.condition("Planned") == ("Unknown", "InspectingModel"), "deleting the Job tries again"


def _fail(world, plan_hash: str) -> None:
    """The worker of a revision ends for good: kubelet would restart it."""
    message = TerminationMessage(reason=TerminationReason.InvalidCheckpoint, message="layer 3 is missing.").encode()
    (pod,) = world.cluster.pods_of(world.deployment(plan_hash))
    ended = {"terminated": {"exitCode": TERMINAL_EXIT_CODE, "message": message}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    world.cluster.set_pod(
        pod, phase="Running", containerStatuses=[{"name": "worker", "state": waiting, "lastState": ended}]
    )
    world.settle()


def test_an_answer_that_went_with_its_pod_is_asked_for_again(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    world.create(tiny_spec)
    (job,) = world.cluster.of(JOB)
    (pod,) = world.cluster.pods_of(job)
    world.cluster.remove(POD, "ml", pod["metadata"]["name"])
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    world.cluster.change(JOB, job["metadata"]["name"], lambda body: body.update(status=complete))
    world.settle()
    (again,) = world.cluster.of(JOB)
    assert again["metadata"]["uid"] != job["metadata"]["uid"]
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Planned") == ("True", "PlanCommitted")


def test_an_answer_that_cannot_be_read_stalls(world, tiny_spec: dict[str, Any]) -> None:
    world.create(tiny_spec)
    world.cluster.end_job(message="something else")
    world.settle()
    assert world.condition("Stalled") == ("True", "InspectionFailed")
    assert "spec.image" in world.message("Stalled")


def test_a_terminal_failure_stops_the_revision_and_stays_known_over_restarts(ready_world) -> None:
    old = ready_world.served_hash()
    ready_world.edit(context={"maxModelLen": 1024})
    new = ready_world.revision()
    _fail(ready_world, new)
    for _ in range(2):
        assert ready_world.deployments() == {old: 1, new: 0}
        assert ready_world.condition("Stalled") == ("True", "InvalidCheckpoint")
        assert ready_world.condition("Ready") == ("False", "InvalidCheckpoint")
        assert ready_world.condition("Available") == ("True", "Serving"), "the old revision goes on serving"
        assert "layer 3 is missing" in ready_world.message("Stalled")
        ready_world.rest()
        ready_world.restart_operator()
        ready_world.settle()
        assert ready_world.rest() == []
    ready_world.edit(context={"maxModelLen": 512})
    assert ready_world.condition("Stalled") is None, "a spec change makes a new revision and a new attempt"
    assert new not in ready_world.deployments()
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_deleting_the_stopped_deployment_tries_again(ready_world) -> None:
    plan_hash = ready_world.served_hash()
    _fail(ready_world, plan_hash)
    assert ready_world.deployments() == {plan_hash: 0}
    ready_world.cluster.remove(DEPLOYMENT, "ml", f"tiny-{plan_hash}")
    ready_world.settle()
    assert ready_world.deployments() == {plan_hash: 1}
    assert ready_world.condition("Stalled") is None


def test_workers_that_never_get_ready_stall_at_the_deadline_and_recover(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    (deployment,) = world.cluster.of(DEPLOYMENT)
    (pod,) = world.cluster.pods_of(deployment)
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    world.cluster.set_pod(pod, phase="Pending", containerStatuses=[{"name": "worker", "state": state}])
    world.settle()
    assert world.condition("Reconciling") == ("True", "RollingOut")
    assert "no such image" in world.message("Ready")
    deadline = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    name = deployment["metadata"]["name"]
    world.cluster.change(DEPLOYMENT, name, lambda body: body.update(status={"conditions": [deadline]}))
    world.settle()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert "no such image" in world.message("Stalled")
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert world.condition("Stalled") is None


def test_a_spec_that_is_put_right_takes_the_room_of_pods_that_never_loaded(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    (wrong,) = world.deployments()
    world.edit(image="registry.example/worker:right")
    (right,) = set(world.deployments()) - {wrong}
    (pod,) = world.cluster.pods_of(world.deployment(right))
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.cluster.set_pod(pod, phase="Pending", conditions=[full])
    world.settle()
    assert world.deployments() == {wrong: 0, right: 1}
    assert world.condition("CapacityAvailable") == ("False", "WaitingForNodes")


def test_deleted_children_come_back(ready_world) -> None:
    for kind in (SERVICE, DISRUPTION_BUDGET):
        ready_world.rest()
        before = ready_world.cluster.of(kind)[0]["spec"]
        ready_world.cluster.remove(kind, "ml", "tiny")
        ready_world.settle()
        assert ready_world.cluster.of(kind)[0]["spec"] == before
        assert ("apply", kind.kind, "tiny") in ready_world.rest()


def test_drift_in_a_child_is_put_right(ready_world) -> None:
    name = f"tiny-{ready_world.served_hash()}"
    ready_world.cluster.change(DEPLOYMENT, name, lambda body: body["spec"].update(replicas=5))
    ready_world.settle()
    assert list(ready_world.deployments().values()) == [1]
    ready_world.cluster.change(SERVICE, "tiny", lambda body: body["metadata"]["labels"].pop(labels.APP_NAME))
    ready_world.settle()
    assert ready_world.cluster.of(SERVICE)[0]["metadata"]["labels"][labels.APP_NAME] == "modelserve"


def test_wiped_status_and_a_restart_touch_no_pod(ready_world) -> None:
    pods = {pod["metadata"]["uid"] for pod in ready_world.cluster.of(POD)}
    status = ready_world.status()
    ready_world.rest()
    ready_world.cluster.listener = None  # the operator is down
    ready_world.cluster.change(MODEL_SERVE, "tiny", lambda body: body.pop("status"))
    ready_world.restart_operator()
    ready_world.settle()
    assert [write for write in ready_world.rest() if write[0] != "create"] == [("patch/status", "ModelServe", "tiny")]
    assert {pod["metadata"]["uid"] for pod in ready_world.cluster.of(POD)} == pods
    written = ready_world.status()
    for condition in (*status["conditions"], *written["conditions"]):
        condition.pop("lastTransitionTime")
    assert written == status


def test_an_operator_with_another_default_image_only_proposes(ready_world) -> None:
    before = ready_world.deployments()
    ready_world.settings = ready_world.settings.model_copy(update={"worker_image": "worker:newer"})
    ready_world.rest()
    ready_world.restart_operator()
    ready_world.settle()
    proposed = ready_world.status()["proposedRevision"].removeprefix("tiny-")
    assert ready_world.deployments() == before
    assert ready_world.condition("Ready") == ("True", "RolledOut")

    def approve(body: dict[str, Any]) -> None:
        body["metadata"]["annotations"] = {labels.APPROVE_PLAN: proposed}

    ready_world.cluster.change(MODEL_SERVE, "tiny", approve)
    ready_world.settle()
    ready_world.make_ready()
    assert ready_world.deployments() == {proposed: 1}
    assert ready_world.revision() == proposed
    assert "proposedPlan" not in ready_world.status()


def test_a_claim_that_is_made_anew_is_looked_at_within_a_minute(world, tiny_spec: dict[str, Any]) -> None:
    def modes(*given: str) -> None:
        metadata = {"name": "weights", "namespace": "ml"}
        world.cluster.put(CLAIM, {"metadata": metadata, "spec": {"accessModes": list(given)}, "status": {}})

    modes("ReadWriteOnce")
    world.create({**tiny_spec, "replicas": 2})
    assert world.condition("Accepted") == ("False", "VolumeNotShareable")
    world.pass_time(59)
    modes("ReadWriteMany")
    world.pass_time(1)
    assert world.condition("Accepted") == ("True", "Valid")
    assert world.condition("Stalled") is None
    world.rest()
    world.pass_time(3600)
    assert world.rest() == []


def test_a_claim_for_one_pod_refuses_two(world, tiny_spec: dict[str, Any]) -> None:
    world.cluster.change(CLAIM, "weights", lambda body: body["spec"].update(accessModes=["ReadWriteOnce"]))
    world.create(tiny_spec)
    assert world.condition("Accepted") == ("False", "VolumeNotShareable")
    assert world.condition("Stalled") == ("True", "VolumeNotShareable")
    assert "allowDowntime" in world.message("Accepted")
    assert world.cluster.of(JOB) == []
    world.edit(rollout={"maxSurge": 0, "allowDowntime": True})
    assert world.condition("Accepted") == ("True", "Valid")


def test_a_foreign_object_of_the_same_name_is_left_alone(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    foreign = {"metadata": {"name": "tiny", "namespace": "ml"}, "spec": {"clusterIP": "10.1.2.3"}}
    world.cluster.put(SERVICE, foreign)
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Accepted") == ("False", "NameConflict")
    assert "Service ml/tiny exists" in world.message("Stalled")
    assert world.cluster.of(DEPLOYMENT) == [], "no worker is started for a name that it cannot have"
    assert "url" not in world.status(), "it is somebody else's"
    assert world.cluster.of(SERVICE)[0]["spec"] == {"clusterIP": "10.1.2.3"}
    world.cluster.remove(SERVICE, "ml", "tiny")
    world.pass_time(30)
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    assert world.status()["url"] == "http://tiny.ml.svc/v1"


def test_orphans_of_a_deleted_namesake_are_adopted_and_serve_on(ready_world, tiny_spec: dict[str, Any]) -> None:
    """kubectl delete --cascade=orphan, and the same manifest applied again."""
    cluster, kinds = ready_world.cluster, (SERVICE, DISRUPTION_BUDGET, DEPLOYMENT, CONFIG_MAP)
    (served,) = cluster.of(SERVICE)
    uids = {body["metadata"]["uid"] for kind in (*kinds, POD) for body in cluster.of(kind)}
    for kind in kinds:
        for body in cluster.of(kind):
            cluster.change(kind, body["metadata"]["name"], lambda child: child["metadata"].pop("ownerReferences"))
    cluster.remove(MODEL_SERVE, "ml", "tiny")
    ready_world.settle()
    ready_world.restart_operator()
    ready_world.create(tiny_spec)
    owner = cluster.objects[MODEL_SERVE, "ml", "tiny"]["metadata"]["uid"]
    assert {body["metadata"]["uid"] for kind in (*kinds, POD) for body in cluster.of(kind)} == uids
    for kind in kinds:
        for body in cluster.of(kind):
            assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == [owner]
    assert ready_world.condition("Ready") == ("True", "RolledOut")
    assert cluster.of(JOB) == [], "the facts of the model were kept too"
    copied = {"name": "a-copy", "namespace": "ml", "labels": served["metadata"]["labels"]}
    copy = cluster.put(SERVICE, {"metadata": copied, "spec": served["spec"]})
    ready_world.settle()
    assert "ownerReferences" not in copy["metadata"], "a copy is its maker's"
    cluster.remove(SERVICE, "ml", "a-copy")
    ready_world.rest()
    ready_world.restart_operator()
    ready_world.settle()
    assert ready_world.rest() == []


def test_a_successor_of_the_same_name_waits_for_the_collector(ready_world, tiny_spec: dict[str, Any]) -> None:
    cluster = ready_world.cluster
    children = (SERVICE, DISRUPTION_BUDGET, DEPLOYMENT, CONFIG_MAP)
    left = {key: body for key, body in cluster.objects.items() if key[0] in children}
    facts = next(body for body in left.values() if "model.json" in body.get("data", {}))["data"]["model.json"]
    cluster.remove(MODEL_SERVE, "ml", "tiny")
    cluster.objects.update(left)  # the collector has not been here yet
    ready_world.restart_operator()
    ready_world.create(tiny_spec)
    cluster.end_job(message=facts)
    ready_world.settle()
    conditions = cluster.objects[MODEL_SERVE, "ml", "tiny"].get("status", {}).get("conditions", [])
    assert "NameConflict" not in [each["reason"] for each in conditions]
    for kind, namespace, name in left:
        cluster.remove(kind, namespace, name)
    ready_world.settle()
    ready_world.make_ready()
    assert ready_world.condition("Ready") == ("True", "RolledOut")


def test_what_the_api_server_finds_invalid_is_said_and_not_retried_at_once(
    world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    def strict(request: Any) -> None:
        if (request.verb, request.kind) == ("apply", DEPLOYMENT):
            resources = request.body["spec"]["template"]["spec"]["containers"][0]["resources"]
            if resources["requests"].get("memory") == "9Gi":
                raise KubeError(422, "requests: Invalid value: must be less than or equal to memory limit of 3Gi")

    world.cluster.asked = strict
    resources = {"requests": {"cpu": "0.5", "memory": "9Gi"}, "limits": {"memory": "3Gi"}}
    world.create({**tiny_spec, "pod": {"resources": resources}})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert world.condition("Ready") == ("False", "InvalidSpec")
    assert "memory limit of 3Gi" in world.message("Stalled")
    world.edit(pod=tiny_spec["pod"])
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")


def test_an_invalid_spec_names_the_field_and_leaves_the_workers(ready_world) -> None:
    before = ready_world.deployments()
    ready_world.edit(context={"maxModelLen": 100, "minModelLen": 200})
    assert ready_world.condition("Accepted") == ("False", "InvalidSpec")
    assert "minModelLen must be at most maxModelLen" in ready_world.message("Accepted")
    assert ready_world.deployments() == before
    assert ready_world.condition("Available") == ("True", "Serving")


def test_a_variable_that_is_named_twice_is_refused_with_its_name(ready_world) -> None:
    ready_world.edit(pod={"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]})
    assert ready_world.condition("Accepted") == ("False", "InvalidSpec")
    assert "env names A more than once" in ready_world.message("Accepted")


def test_events_are_for_transitions_only(ready_world) -> None:
    reasons = [event["reason"] for event in ready_world.cluster.events]
    assert reasons == ["PlanCommitted", "RolledOut"]
