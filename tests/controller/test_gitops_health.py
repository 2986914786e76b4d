"""What GitOps tools make of each state of a ModelServe: Argo CD by the health check in docs/gitops, Flux by kstatus.

The fixtures are what the operator writes, in Argo CD's own layout: MODELSERVE_RECORD=1 writes them anew. The program of
tests/cluster/gitops judges them, with the Lua interpreter of Argo CD and kstatus of Flux's fork.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.binaries import require_tool
from localcluster.settings import ClusterError
from modelserve.crd import custom_resource_definition
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CAPACITY_BUFFER,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    HTTP_ROUTE,
    MODEL_SERVE,
    NODE,
    POD,
    POD_TEMPLATE,
    SERVICE,
)
from modelserve_operator.reasons import ConditionType

LAYOUT = Path("docs/gitops/argocd/resource_customizations/serving.modelserve.dev/ModelServe")
FOLDER = Path(__file__).resolve().parents[2] / LAYOUT
MODEL = {"uri": "hf://google/gemma-4-31B-it"}
H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}
SHOWN = ("observedGeneration", "conditions", "phase", "replicas", "readyReplicas")


def _create(world, **spec: Any) -> None:
    world.create({"model": MODEL, **spec}, name="big")


def _serving(world) -> None:
    world.add_node("a", **H200)
    _create(world)
    world.make_ready()


def _pods(world, **status: Any) -> None:
    """The pods that are not ready say this."""
    for pod in world.cluster.of(POD):
        if not any(each["status"] == "True" for each in pod["status"].get("conditions", ())):
            world.cluster.set_pod(pod, **status)
    world.settle()


def _unschedulable(world, reason: str, message: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    _pods(world, phase="Pending", conditions=[scheduled])


def _worker(world, waits: str, **more: Any) -> None:
    state = {"name": "worker", "state": {"waiting": {"reason": waits, "message": "no"}}, **more}
    _pods(world, phase="Running", containerStatuses=[state])


def unseen(world) -> None:
    """As the API server answers its creation, with the default of the schema."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    metadata = {"name": "big", "namespace": "ml"}
    body = {"metadata": metadata, "spec": {"model": MODEL}, "status": schema["properties"]["status"]["default"]}
    world.cluster.put(MODEL_SERVE, body)


def edited_and_unseen(world) -> None:
    _serving(world)
    world.cluster.change(MODEL_SERVE, "big", lambda body: body["spec"].update(replicas=2))


def inspecting(world) -> None:
    world.create({"model": {"uri": "hf://somebody/gemma-4-mine"}}, name="big")


def inspection_failed(world) -> None:
    inspecting(world)
    world.cluster.end_job(message=json.dumps({"reason": "UnsupportedModel", "message": "no Gemma 4"}), exit_code=78)
    world.settle()


def starting(world) -> None:
    world.add_node("a", **H200)
    _create(world)


def rolling_out(world) -> None:
    _serving(world)
    world.edit("big", context={"maxModelLen": 4096})


def ready(world) -> None:
    _serving(world)


def scaled_to_zero(world) -> None:
    _serving(world)
    world.edit("big", replicas=0)


def waiting_for_nodes(world) -> None:
    starting(world)
    _unschedulable(world, "Unschedulable", "0/3 nodes are available")


def scheduling_gated(world) -> None:
    starting(world)
    _unschedulable(world, "SchedulingGated", "blocked by gates")


def waiting_for_quota(world) -> None:
    starting(world)
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    for pod in world.cluster.of(POD):
        world.cluster.change(POD, pod["metadata"]["name"], lambda body: body["spec"].update(schedulingGates=gates))
    _unschedulable(world, "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")


def buffered(world) -> None:
    """An autoscaler keeps a node for one more worker."""
    world.serve(POD_TEMPLATE, CAPACITY_BUFFER)
    _serving(world)
    world.edit("big", capacityBuffer={"replicas": 1})
    states = [
        {"type": "ReadyForProvisioning", "status": "True", "reason": "Resolved"},
        {"type": "Provisioning", "status": "True", "reason": "FitsExistingCapacity", "message": "all fit"},
    ]
    said = {"replicas": 1, "conditions": states}
    world.cluster.change(CAPACITY_BUFFER, "big", lambda body: body.update(status=said))
    world.settle()


def buffer_not_served(world) -> None:
    _serving(world)
    world.edit("big", capacityBuffer={"replicas": 1})


def routed(world) -> None:
    world.serve(HTTP_ROUTE)
    _serving(world)
    world.edit("big", gateway={"parentRefs": [{"name": "inference-gateway"}]})
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    parents = [{"parentRef": {"name": "inference-gateway"}, "conditions": [accepted]}]
    world.cluster.change(HTTP_ROUTE, "big", lambda each: each.update(status={"parents": parents}))
    world.settle()


def gateway_not_served(world) -> None:
    _serving(world)
    world.edit("big", gateway={"parentRefs": [{"name": "inference-gateway"}]})


def no_surge_capacity(world) -> None:
    rolling_out(world)
    _unschedulable(world, "Unschedulable", "Insufficient nvidia.com/gpu")


def pools_gone(world) -> None:
    starting(world)
    world.add_node("b", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    world.cluster.remove(NODE, "", "a")
    world.settle()


def pools_gone_and_replanned_soon(world) -> None:
    pools_gone(world)
    world.edit("big", plan={"replan": {"when": "Lost"}})


def no_accelerators(world) -> None:
    _create(world)


def does_not_fit(world) -> None:
    world.add_node("a", product="NVIDIA-L4", memory_mib=23_034, gpus=1)
    _create(world)


def invalid_spec(world) -> None:
    _serving(world)
    world.edit("big", engine={"maxNumSeqs": -1})


def drafter_of_another_model(world) -> None:
    _serving(world)
    world.edit("big", drafter={"uri": "hf://google/gemma-4-E2B-it-assistant"})


def waiting_for_the_first_approval(world) -> None:
    world.add_node("a", **H200)
    _create(world, plan={"mode": "Manual"})


def edit_waiting_for_approval(world) -> None:
    _serving(world)
    world.edit("big", plan={"mode": "Manual"}, context={"maxModelLen": 4096})


def previewed(world) -> None:
    world.add_node("a", **H200)
    _create(world, plan={"mode": "PreviewOnly"})


def previewed_beside_what_runs(world) -> None:
    _serving(world)
    world.edit("big", plan={"mode": "PreviewOnly"}, context={"maxModelLen": 4096})


def crash_loop_while_another_serves(world) -> None:
    rolling_out(world)
    ended = {"terminated": {"exitCode": 1, "message": "boom"}}
    _worker(world, "CrashLoopBackOff", restartCount=9, lastState=ended)


def worker_failed_for_good(world) -> None:
    starting(world)
    told = json.dumps({"reason": "InvalidCheckpoint", "message": "layer 3 is missing."})
    _worker(world, "CrashLoopBackOff", lastState={"terminated": {"exitCode": 78, "message": told}})


def image_not_pulled(world) -> None:
    starting(world)
    state = {"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    since = {"type": "Ready", "status": "False", "lastTransitionTime": "2025-12-31T23:00:00Z"}
    _pods(world, phase="Pending", conditions=[since], containerStatuses=[state])


def name_taken(world) -> None:
    world.cluster.put(SERVICE, {"metadata": {"name": "big", "namespace": "ml"}, "spec": {"clusterIP": "10.1.2.3"}})
    starting(world)


def drift_contested(world) -> None:
    _serving(world)
    for _ in range(4):
        (body,) = world.cluster.of(DEPLOYMENT)
        world.cluster.change(DEPLOYMENT, body["metadata"]["name"], lambda body: body["spec"].update(paused=True))
        world.settle()


def pinned_to_nothing(world) -> None:
    _serving(world)
    world.edit("big", plan={"revision": "big-0123456789"})


def revision_unreadable(world) -> None:
    _serving(world)
    (body,) = (copy.deepcopy(each) for each in world.cluster.of(CONTROLLER_REVISION))
    body["data"]["weightBytes"] = 1
    world.cluster.listener = None
    world.cluster.objects[CONTROLLER_REVISION, "ml", body["metadata"]["name"]] = body
    world.restart_operator()
    world.settle()


PROGRESSING, HEALTHY = ("Progressing", "InProgress"), ("Healthy", "Current")
DEGRADED, RESTS = ("Degraded", "Failed"), ("Suspended", "Current")
SCENES: dict[Callable[[Any], None], tuple[str, str]] = {
    unseen: PROGRESSING,
    edited_and_unseen: PROGRESSING,
    inspecting: PROGRESSING,
    inspection_failed: DEGRADED,
    starting: PROGRESSING,
    rolling_out: PROGRESSING,
    ready: HEALTHY,
    scaled_to_zero: HEALTHY,
    waiting_for_nodes: PROGRESSING,
    scheduling_gated: PROGRESSING,
    waiting_for_quota: PROGRESSING,
    buffered: HEALTHY,
    buffer_not_served: HEALTHY,
    routed: HEALTHY,
    gateway_not_served: HEALTHY,
    no_surge_capacity: PROGRESSING,
    pools_gone: DEGRADED,
    pools_gone_and_replanned_soon: PROGRESSING,
    no_accelerators: PROGRESSING,
    does_not_fit: DEGRADED,
    invalid_spec: DEGRADED,
    drafter_of_another_model: DEGRADED,
    waiting_for_the_first_approval: RESTS,
    edit_waiting_for_approval: ("Suspended", "InProgress"),
    previewed: RESTS,
    previewed_beside_what_runs: HEALTHY,
    crash_loop_while_another_serves: DEGRADED,
    worker_failed_for_good: DEGRADED,
    image_not_pulled: DEGRADED,
    name_taken: DEGRADED,
    drift_contested: DEGRADED,
    pinned_to_nothing: DEGRADED,
    revision_unreadable: DEGRADED,
}


def _fixture(world, scene: Callable[[Any], None]) -> dict[str, Any]:
    """The object as tools read it, but for what no tool judges by."""
    scene(world)
    body = world.cluster.objects[MODEL_SERVE, "ml", "big"]
    metadata = {key: body["metadata"][key] for key in ("name", "namespace", "generation")}
    status = {key: value for key, value in body["status"].items() if key in SHOWN}
    version = f"{labels.GROUP}/v1alpha1"
    return {"apiVersion": version, "kind": "ModelServe", "metadata": metadata, "spec": body["spec"], "status": status}


def _path(scene: Callable[[Any], None]) -> Path:
    return FOLDER / "testdata" / f"{scene.__name__}.yaml"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_fixtures_are_what_the_operator_writes(world, scene: Callable[[Any], None]) -> None:
    made = _fixture(world, scene)
    if "MODELSERVE_RECORD" in os.environ:
        _path(scene).write_text(yaml.safe_dump(made, sort_keys=False, width=120))
    assert _judged_by(yaml.safe_load(_path(scene).read_text())) == _judged_by(made)


def _judged_by(body: dict[str, Any]) -> tuple[Any, ...]:
    """What a verdict depends on: neither words nor figures, which other changes may touch."""
    found = [(each["type"], each["status"], each["reason"]) for each in body["status"]["conditions"]]
    return body["metadata"]["generation"], body["status"].get("observedGeneration"), found


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[str, dict[str, str]]]:
    """By scene: what Argo CD and kstatus say."""
    try:
        program = require_tool("gitops", print)
    except ClusterError as error:
        pytest.skip(str(error))
    objects = [yaml.safe_load(_path(scene).read_text()) for scene in SCENES]
    line = [str(program), str(FOLDER / "health.lua")]
    done = subprocess.run(line, input=json.dumps(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip((scene.__name__ for scene in SCENES), json.loads(done.stdout), strict=True))


def test_each_state_is_what_a_pipeline_should_take_it_for(verdicts: dict[str, Any]) -> None:
    found = {name: (each["argo"]["status"], each["kstatus"]["status"]) for name, each in verdicts.items()}
    assert found == {scene.__name__: wanted for scene, wanted in SCENES.items()}


def test_argo_cds_own_test_file_says_the_same(verdicts: dict[str, Any]) -> None:
    """What its repository would run, were the check offered there."""
    made = {
        "tests": [
            {"healthStatus": each["argo"], "inputPath": f"testdata/{name}.yaml"} for name, each in verdicts.items()
        ]
    }
    path = FOLDER / "health_test.yaml"
    if "MODELSERVE_RECORD" in os.environ:
        path.write_text(yaml.safe_dump(made, sort_keys=False, width=120))
    assert yaml.safe_load(path.read_text()) == made


def test_every_condition_is_in_a_fixture_in_each_state_that_it_has() -> None:
    found = {
        (condition["type"], condition["status"])
        for scene in SCENES
        for condition in yaml.safe_load(_path(scene).read_text())["status"]["conditions"]
    }
    only_true = {ConditionType.RECONCILING, ConditionType.STALLED, ConditionType.POOLS_GONE}
    assert found >= {(kind.value, "True") for kind in ConditionType}
    assert found >= {(kind.value, "False") for kind in set(ConditionType) - only_true}
