"""What the operator applies: Pod Security `restricted`, who sees the token, budgets, and whose field wins."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from modelserve.api import ModelServe, ModelServeSpec
from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.model.model_facts import ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CACHE_RULES, CLUSTER_RULES, NAMESPACED_RULES, OPTIONAL, WATCHED
from modelserve_operator.inventory.pools import Pool
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.inspect_job import inspect_job
from modelserve_operator.manifests.revision_objects import controller_revision
from modelserve_operator.manifests.worker_template import progress_deadline_seconds, startup_seconds
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.revisions.revision import Revision, bare, revision_of
from modelserve_operator.settings import Settings
from modelserve_operator.sources import model_source

SETTINGS = Settings(worker_image="worker:test")
HF = {"uri": "hf://example/small", "revision": "v1", "authSecretRef": {"name": "hf", "key": "token"}}
H200 = Pool((("nvidia.com/gpu.product", "NVIDIA-H200"),), resources=(("nvidia.com/gpu", "8"),))
OWNER = {"metadata": {"name": "m", "namespace": "ml", "uid": "u"}}


def _spec(**fields: Any) -> ModelServeSpec:
    document = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "m", "namespace": "ml"},
        "spec": {"model": {"uri": "pvc://weights/sub/dir"}, "accelerators": {"products": ["CPU"]}, **fields},
    }
    return ModelServe.parse(document, stored=True).spec  # as the operator reads it


def _revision(spec: ModelServeSpec, facts: ModelFacts) -> Revision:
    plan = plan_for(spec, facts, Supply(pools=(H200,)))
    return RevisionBuilder(spec, "m", model_source(spec), facts, SETTINGS).proposed(plan)


def _pod(spec: ModelServeSpec, facts: ModelFacts) -> dict[str, Any]:
    return dict(_revision(spec, facts).template["spec"])


def _job_pod(spec: ModelServeSpec) -> dict[str, Any]:
    job = inspect_job(OWNER, spec, source=model_source(spec), image="i", pull_policy="Always", user_id=65532)
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("model", [{"uri": "pvc://weights/x"}, HF])
@pytest.mark.parametrize("kind", ["worker", "inspect"])
def test_pods_meet_pod_security_restricted(tiny_facts: ModelFacts, model: dict[str, Any], kind: str) -> None:
    spec = _spec(model=model)
    pod = _pod(spec, tiny_facts) if kind == "worker" else _job_pod(spec)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (65532, 65532, 65532)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"]), "no hostPath anywhere"
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    assert len(containers) == (1 if model is not HF else 3 if kind == "worker" else 2)
    for container in containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("kind", ["worker", "inspect"])
def test_only_the_download_sees_the_token_and_may_write(tiny_facts: ModelFacts, kind: str) -> None:
    spec = _spec(model=HF, storage={"pvcName": "cache", "subPath": "gemma"})
    pod = _pod(spec, tiny_facts) if kind == "worker" else _job_pod(spec)
    (*before, fetch), (main,) = pod["initContainers"], pod["containers"]
    assert [each["name"] for each in before] == (["resolve"] if kind == "worker" else [])
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    assert token in fetch["env"]
    assert "HF_TOKEN" not in {variable["name"] for variable in main["env"]}
    weights = {
        c["name"]: mount for c in (*before, fetch, main) for mount in c["volumeMounts"] if mount["name"] == "weights"
    }
    assert "readOnly" not in weights["fetch"]
    assert all(weights[each["name"]]["readOnly"] is True for each in (*before, main))
    assert fetch["command"][:8] == [
        "modelserve-worker", "fetch", "--uri", "hf://example/small", "--revision", "v1",
        "--dest", "/models/gemma/example/small/v1",
    ]  # fmt: skip
    assert ("--metadata-only" in fetch["command"]) is (kind == "inspect")
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "weights"]
    expected = {"persistentVolumeClaim": {"claimName": "cache"}} if kind == "worker" else {"emptyDir": {}}
    assert volume == {"name": "weights", **expected}


def test_the_mounted_settings_are_those_of_the_plan(tiny_facts: ModelFacts) -> None:
    revision = _revision(_spec(context={"maxModelLen": 1024}, rollout={"drainSeconds": 7}), tiny_facts)
    arguments = EngineArgs.model_validate(yaml.safe_load(revision.engine_yaml))
    assert (arguments.model, arguments.device, arguments.max_model_len) == ("/models/sub/dir", "cpu", 1024)
    assert arguments.drain_seconds == 7
    assert arguments.served_model_name == "dir"
    (worker,) = revision.template["spec"]["containers"]
    assert worker["command"] == ["modelserve-worker", "serve", "--config", "/etc/modelserve/engine.yaml"]
    grace = revision.template["spec"]["terminationGracePeriodSeconds"]
    assert grace > arguments.shutdown_delay_seconds + arguments.drain_seconds
    probe = worker["readinessProbe"]
    assert arguments.shutdown_delay_seconds > probe["periodSeconds"] * probe["failureThreshold"]
    startup = worker["startupProbe"]
    assert startup["httpGet"] == probe["httpGet"]
    assert startup["periodSeconds"] <= probe["periodSeconds"], "a worker that has loaded does not wait to be found"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_the_worker_is_told_which_gpu_it_was_sized_for_and_none_on_the_cpu(tiny_facts: ModelFacts) -> None:
    def settings(**fields: Any) -> EngineArgs:
        return EngineArgs.model_validate(yaml.safe_load(_revision(_spec(**fields), tiny_facts).engine_yaml))

    on_gpu = settings(accelerators={}, kvCache={"gpuMemoryUtilization": "0.85"})
    assert on_gpu.accelerator == "NVIDIA-H200"
    assert on_gpu.accelerator_memory_bytes == pytest.approx(CATALOGUE["NVIDIA-H200"].visible_bytes, abs=1024)
    on_cpu = settings()
    assert (on_cpu.accelerator, on_cpu.accelerator_memory_bytes) == (None, None)


def test_the_cpu_gets_the_memory_that_was_planned_and_no_gpu(tiny_facts: ModelFacts) -> None:
    resources = {"requests": {"cpu": "1", "nvidia.com/gpu": "1"}, "limits": {"memory": "3Gi"}}
    pod = _pod(_spec(pod={"resources": resources}), tiny_facts)
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": str(3 << 30)},
        "limits": {"cpu": "4", "memory": str(3 << 30)},
    }
    assert "tolerations" not in pod


def test_pods_of_the_worker_s_image_run_where_it_is_built_for(tiny_facts: ModelFacts) -> None:
    """A worker on the CPU and the Job that inspects: in a mixed cluster they would end in an exec format error."""
    spec = _spec()
    (job,) = [inspect_job(
        OWNER, spec, source=model_source(spec), image="i", pull_policy="Always", user_id=1,
        architectures=("amd64", "arm64"),
    )]  # fmt: skip
    runs = [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]
    for pod, values in ((_pod(spec, tiny_facts), ["amd64"]), (job["spec"]["template"]["spec"], ["amd64", "arm64"])):
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert required == {"nodeSelectorTerms": [{"matchExpressions": [{**runs[0], "values": values}]}]}


def test_tensor_parallel_pods_get_shared_memory_and_tolerate_the_gpu_taint(tiny_facts: ModelFacts) -> None:
    spec = _spec(accelerators={"nodeSelector": {"zone": "a"}}, parallelism={"tensor": 2})
    pool = Pool((*H200.labels, ("zone", "a")), resources=H200.resources)
    plan = plan_for(spec, tiny_facts, Supply(pools=(pool,)))
    revision = RevisionBuilder(spec, "m", model_source(spec), tiny_facts, SETTINGS).proposed(plan)
    pod = revision.template["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": "zone", "operator": "In", "values": ["a"]} in terms[0]["matchExpressions"]


def test_what_the_operator_sets_wins_over_the_users_additions(tiny_facts: ModelFacts) -> None:
    additions = {
        "labels": {"team": "a", labels.PLAN_HASH: "mine"},
        "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "OMP_NUM_THREADS", "value": "4"}],
    }
    revision = _revision(_spec(pod=additions), tiny_facts)
    assert revision.template["metadata"]["labels"]["team"] == "a"
    assert revision.template["metadata"]["labels"][labels.PLAN_HASH] == revision.hash
    env = revision.template["spec"]["containers"][0]["env"]
    assert [variable["value"] for variable in env if variable["name"] == "HF_HUB_OFFLINE"] == ["1"]
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in env


@pytest.mark.parametrize(("image", "asked"), [("worker:0.1.0", False), ("worker:0.2.0", True), ("worker:test", True)])
def test_an_older_image_is_not_asked_for_what_it_cannot_tell(image: str, asked: bool) -> None:
    spec = _spec()
    job = inspect_job(OWNER, spec, source=model_source(spec), image=image, pull_policy="Always", user_id=None)
    (inspect,) = job["spec"]["template"]["spec"]["containers"]
    assert ("--identity" in inspect["command"]) is asked


def test_start_up_budgets_grow_with_the_bytes() -> None:
    assert startup_seconds(1) == 1800
    assert startup_seconds(62_500_000_000) == 2500
    assert progress_deadline_seconds(62_500_000_000) > 2 * 2500


def test_a_revision_reads_back_what_it_wrote(tiny_facts: ModelFacts) -> None:
    revision = replace(_revision(_spec(), tiny_facts), number=3)
    body = json.loads(json.dumps(controller_revision(OWNER, revision)))
    assert revision_of(body) == replace(revision, plan=bare(revision.plan))
    assert len(json.dumps(body)) < 10_000


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"replicas": 7}, True),
        ({"rollout": {"maxSurge": 2, "allowDowntime": True}}, True),
        ({"plan": {"mode": "Manual"}}, True),
        ({"rollout": {"drainSeconds": 5}}, False),
        ({"pod": {"labels": {"a": "b"}}}, False),
        ({"image": "other:1"}, False),
        ({"context": {"maxModelLen": 512}}, False),
    ],
)
def test_the_hash_covers_what_shapes_the_pods_and_nothing_else(
    tiny_facts: ModelFacts, change: dict[str, Any], same: bool
) -> None:
    assert (_revision(_spec(**change), tiny_facts).hash == _revision(_spec(), tiny_facts).hash) is same


def test_a_front_end_that_hangs_does_not_hold_its_gpus_for_the_time_to_drain(tiny_facts: ModelFacts) -> None:
    pod = _pod(_spec(rollout={"drainSeconds": 600}), tiny_facts)
    assert pod["terminationGracePeriodSeconds"] > 600, "who is told to stop drains"
    assert pod["containers"][0]["livenessProbe"]["terminationGracePeriodSeconds"] == 10


def test_the_rbac_rules_cover_every_watched_kind() -> None:
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in (*NAMESPACED_RULES, *CACHE_RULES, *CLUSTER_RULES)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in (*WATCHED, *OPTIONAL):
        assert {"list", "watch"} <= granted[kind.group, kind.plural]
    assert granted["serving.modelserve.dev", "modelserves"] == {"get", "list", "watch"}, "the spec is never written"
    assert ("", "secrets") not in granted


def test_compiled_kernels_outlive_a_pod_on_gpus_where_downloads_do(tiny_facts: ModelFacts) -> None:
    """Not on a claim of the user's own files, which stays read-only as a whole, and not on the CPU."""
    gpu = {"accelerators": {"products": ["NVIDIA-H200"]}}

    def cache(**fields: Any) -> tuple[str, list[dict[str, Any]]]:
        (worker,) = _pod(_spec(**fields), tiny_facts)["containers"]
        (folder,) = [each["value"] for each in worker["env"] if each["name"] == "TRITON_CACHE_DIR"]
        mounts = [each for each in worker["volumeMounts"] if each["name"] == "weights"]
        assert mounts[0] == {"name": "weights", "mountPath": "/models", "readOnly": True}
        return folder, mounts[1:]

    path = "/var/cache/modelserve/kernels"
    mount = {"name": "weights", "mountPath": path, "subPath": ".modelserve/kernels"}
    assert cache(model=HF, storage={"pvcName": "cache"}, **gpu) == (path, [mount])
    for fields in ({"model": HF, **gpu}, gpu, {"model": HF, "storage": {"pvcName": "cache"}}):
        assert cache(**fields) == ("/tmp/triton", [])
