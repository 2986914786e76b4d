"""The pod template of a revision: one worker, all GPUs of its tensor-parallel group, nothing it does not need."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.api.model_source import SecretKeyRef
from modelserve.planning.pools.eligibility import GPU_TOLERATION, HOSTNAME_LABEL
from modelserve.planning.pools.resource_slices import is_device_class
from modelserve.releases import release_number
from modelserve_operator import labels
from modelserve_operator.manifests.claim_template import ask_by_claim
from modelserve_operator.manifests.pod_resources import (
    download_resources,
    worker_resources,
)
from modelserve_operator.manifests.restricted_pod import (
    container,
    drafter_commit_volume,
    environment,
    fetch_container,
    fetch_drafter_container,
    image_pull_secrets,
    keep_compiled_kernels,
    mount_drafters,
    pod_spec,
    resolve_container,
)
from modelserve_operator.observed.snapshot import FETCH_CONTAINER, WORKER_CONTAINER
from modelserve_operator.revisions.revision import ENGINE_FILE, FETCH_DRAFTER_CONTAINERS, RESOLVE_CONTAINER, Worker
from modelserve_operator.rollout import disruption
from modelserve_operator.sources import ModelSource

PORT = 8000
CONFIG_PATH = "/etc/modelserve"
API_KEY_PATH = "/etc/modelserve-api-key"
API_KEY_FILE = "api-key"
ADAPTERS_PATH = "/etc/modelserve-adapters"

READINESS_PERIOD_SECONDS = 2
READINESS_FAILURES = 3
ENDPOINT_SECONDS = 6  # for EndpointSlices, and every node's rules after them, to follow
SHUTDOWN_DELAY_SECONDS = READINESS_PERIOD_SECONDS * READINESS_FAILURES + ENDPOINT_SECONDS
"""From SIGTERM until no Service leads to the worker. The kubelet signals it as soon as the pod is deleted, which takes
the pod out of its Services unless they have no other: then its endpoint goes on as long as it passes for ready."""
HUNG_SECONDS = 10  # from SIGTERM to SIGKILL for a front end that does not answer its liveness probe
EXIT_SECONDS = 15  # for the process to end once its last request has
LOAD_BYTES_PER_SECOND = 25_000_000  # a slow network volume
LEAST_STARTUP_SECONDS = 1800
STARTUP_PERIOD_SECONDS = 2  # a worker that has loaded is found ready after at most that
RESOLVES_SINCE = "0.2.0"  # release of the worker that knows `fetch --resolve`
DRAFTS_SINCE = "0.2.0"  # release of the worker that knows `drafterOptional` and `fetch --optional`
NODE_SECONDS = 900  # a provisioner's new node and the pull of the image


def drafts(worker: Worker) -> bool:
    """Whether a worker knows drafters."""
    return release_number(worker.release) >= release_number(DRAFTS_SINCE)


def startup_seconds(weight_bytes: int) -> int:
    """Time a worker may take to load: max(30 min, bytes at 25 MB/s), and twice the reading when it downloads first."""
    return max(LEAST_STARTUP_SECONDS, math.ceil(weight_bytes / LOAD_BYTES_PER_SECOND))


def progress_deadline_seconds(weight_bytes: int) -> int:
    """Deployment deadline: node, image, download and load together."""
    return NODE_SECONDS + 2 * startup_seconds(weight_bytes)


def worker_template(
    spec: ModelServeSpec,
    plan: PlanStatus,
    *,
    name: str,
    plan_hash: str,
    source: ModelSource,
    weight_bytes: int,
    worker: Worker,
    pull_policy: str,
    pull_secrets: tuple[str, ...] = (),
    user_id: int | None,
    drafters: tuple[ModelSource, ...] = (),
    drafter_bytes: tuple[int, ...] = (),
) -> dict[str, Any]:
    """PodTemplateSpec. What the user adds in spec.pod goes in first; what the operator sets wins. `drafters`: the
    plan's, as pods of the model have them, each of so many bytes."""
    image = worker.image
    extra = spec.pod.to_json()
    own_labels = labels.child(name, labels.WORKER, **{labels.PLAN_HASH: plan_hash})
    sources = (source, *drafters)
    pod: dict[str, Any] = pod_spec(*sources, user_id=user_id)
    serve = container(
        name="worker",
        image=image,
        pull_policy=pull_policy,
        command=["modelserve-worker", "serve", "--config", f"{CONFIG_PATH}/{ENGINE_FILE}"],
    )
    mount_drafters(serve, drafters)
    if plan.resource_name:
        keep_compiled_kernels(serve, source)
    serve["ports"] = [{"name": "http", "containerPort": PORT, "protocol": "TCP"}]
    if spec.engine is not None and spec.engine.kv_events_port:
        serve["ports"].append({"name": "kv-events", "containerPort": spec.engine.kv_events_port, "protocol": "TCP"})
        serve["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if spec.adapters is not None:
        _mount_adapters(pod, serve, name)
    if spec.api_key_secret_ref is not None:
        _mount_api_key(pod, serve, spec.api_key_secret_ref)
    serve["env"] = environment(extra.get("env") or [], [*serve["env"], {"name": "HF_HUB_OFFLINE", "value": "1"}])
    serve["volumeMounts"].append({"name": "engine", "mountPath": CONFIG_PATH, "readOnly": True})
    sizes = zip(sources, (weight_bytes, *drafter_bytes), strict=True)
    scratch = [size for each, size in sizes if each.downloaded and each.claim is None]
    downloaded_bytes = sum(scratch) if scratch else None
    serve["resources"] = worker_resources(extra.get("resources") or {}, plan, downloaded_bytes=downloaded_bytes)
    serve.update(_probes(weight_bytes + sum(drafter_bytes)))
    engine_items = [{"key": ENGINE_FILE, "path": ENGINE_FILE}]
    revision = labels.revision_name(name, plan_hash)
    pod["volumes"].append({"name": "engine", "configMap": {"name": revision, "items": engine_items}})
    if (plan.tensor_parallel or 1) > 1:
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})  # NCCL overflows the default 64 MiB
        serve["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - where NCCL looks
    pod["containers"] = [serve]
    if is_device_class(plan.resource_name):
        ask_by_claim(pod, serve, revision)
    users, downloads = extra.get("env") or [], list[dict[str, Any]]()
    if source.downloaded:
        resolves = source.moves and release_number(worker.release) >= release_number(RESOLVES_SINCE)
        downloads += _downloads(source, image=image, pull_policy=pull_policy, users=users, resolves=resolves)
        if resolves:
            pod["volumes"].append({"name": "commit", "configMap": _recorded(name, source)})
    for number, drafter in enumerate(drafters):
        if drafter.downloaded:
            downloads.append(
                fetch_drafter_container(drafter, number=number, image=image, pull_policy=pull_policy, users=users)
            )
        if drafter.moves:
            pod["volumes"].append({"name": drafter_commit_volume(number), "configMap": _recorded(name, drafter)})
    if downloads:
        pod["initContainers"] = [{**each, "resources": download_resources(serve["resources"])} for each in downloads]
    pod.update(_placement(spec, plan, name=name, plan_hash=plan_hash))
    for option in ("serviceAccountName", "priorityClassName", "runtimeClassName"):
        if extra.get(option):
            pod[option] = extra[option]
    if secrets := image_pull_secrets(spec, pull_secrets):
        pod["imagePullSecrets"] = secrets
    pod["terminationGracePeriodSeconds"] = SHUTDOWN_DELAY_SECONDS + spec.rollout.drain_seconds + EXIT_SECONDS
    annotations = disruption.at_birth(extra.get("annotations") or {})
    told = {labels.ENGINE_TYPE: "vllm", **extra.get("labels", {}), **own_labels}
    metadata = {"labels": told, "annotations": annotations}
    return {"metadata": metadata, "spec": pod}


def _recorded(name: str, source: ModelSource) -> dict[str, Any]:
    """The ConfigMap that has the commit once the first pod has told it."""
    return {"name": labels.commit_name(name, source.hash), "optional": True}


def _downloads(
    source: ModelSource, *, image: str, pull_policy: str, users: list[dict[str, Any]], resolves: bool
) -> Iterator[dict[str, Any]]:
    """The init containers that bring the weights."""
    if resolves:
        yield resolve_container(source, image=image, pull_policy=pull_policy, users=users)
    yield fetch_container(
        source, image=image, pull_policy=pull_policy, metadata_only=False, users=users, resolved=resolves
    )


def with_worker(template: Mapping[str, Any], *, worker: Worker, name: str, before: str, after: str) -> dict[str, Any]:
    """The template of revision `before` (a hash) as that of `after`, whose containers run another worker."""
    found, image = copy.deepcopy(dict(template)), worker.image
    pod = found["spec"]
    if not drafts(worker):
        first = pod.pop("initContainers", ())
        if kept := [each for each in first if each["name"] not in FETCH_DRAFTER_CONTAINERS]:
            pod["initContainers"] = kept
    for container_ in (*pod["containers"], *pod.get("initContainers", ())):
        if container_["name"] in (WORKER_CONTAINER, FETCH_CONTAINER, RESOLVE_CONTAINER, *FETCH_DRAFTER_CONTAINERS):
            container_["image"] = image
    found["metadata"]["labels"][labels.PLAN_HASH] = after
    for claim in pod.get("resourceClaims", ()):
        if claim.get("resourceClaimTemplateName") == labels.revision_name(name, before):
            claim["resourceClaimTemplateName"] = labels.revision_name(name, after)
    for volume in pod["volumes"]:
        if volume.get("configMap", {}).get("name") == labels.revision_name(name, before):
            volume["configMap"]["name"] = labels.revision_name(name, after)
    for constraint in pod.get("topologySpreadConstraints", ()):
        matched = constraint.get("labelSelector", {}).get("matchLabels", {})
        if matched.get(labels.PLAN_HASH) == before:
            matched[labels.PLAN_HASH] = after
    return found


def _mount_api_key(pod: dict[str, Any], worker: dict[str, Any], secret: SecretKeyRef) -> None:
    """A file and not a variable: a new key arrives in it without a new pod."""
    items = [{"key": secret.key, "path": API_KEY_FILE}]
    pod["volumes"].append({"name": "api-key", "secret": {"secretName": secret.name, "items": items}})
    worker["volumeMounts"].append({"name": "api-key", "mountPath": API_KEY_PATH, "readOnly": True})
    worker["env"].append({"name": "MODELSERVE_API_KEY_FILE", "value": f"{API_KEY_PATH}/{API_KEY_FILE}"})


def _mount_adapters(pod: dict[str, Any], worker: dict[str, Any], name: str) -> None:
    """Which adapters to serve, for a worker that starts while no operator runs, and the digest of the operator's key.
    Both change without a new pod, and may not be there yet."""
    pod["volumes"].append({"name": "adapters", "configMap": {"name": labels.adapters_name(name), "optional": True}})
    worker["volumeMounts"].append({"name": "adapters", "mountPath": ADAPTERS_PATH, "readOnly": True})
    worker["env"].append({"name": "MODELSERVE_ADAPTERS_DIR", "value": ADAPTERS_PATH})


def _probes(weight_bytes: int) -> dict[str, Any]:
    health, ready = ({"httpGet": {"path": path, "port": "http"}} for path in ("/health", "/ready"))
    return {
        "startupProbe": {
            **ready,  # /health answers from the first second; the budget is for the weights
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": math.ceil(startup_seconds(weight_bytes) / STARTUP_PERIOD_SECONDS),
        },
        "readinessProbe": {
            **ready,
            "periodSeconds": READINESS_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": READINESS_FAILURES,
        },
        "livenessProbe": {
            **health,
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 4,
            # What hangs drains nothing: else it held its GPUs for the whole of drainSeconds more.
            "terminationGracePeriodSeconds": HUNG_SECONDS,
        },
    }


def _placement(spec: ModelServeSpec, plan: PlanStatus, *, name: str, plan_hash: str) -> dict[str, Any]:
    """One node selector term per pool (with the user's selector in each, by the plan), tolerations, a soft spread."""
    placement: dict[str, Any] = {}
    terms = [term.to_json() for term in plan.node_selector_terms or ()]
    if terms:
        required = {"nodeSelectorTerms": terms}
        placement["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    tolerations = [toleration.to_json() for toleration in spec.pod.tolerations]
    if plan.resource_name:
        tolerations.append(GPU_TOLERATION)
    if tolerations:
        placement["tolerations"] = tolerations
    same_revision = {labels.NAME: name, labels.PLAN_HASH: plan_hash}
    placement["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": same_revision},
        }
        for key in ("topology.kubernetes.io/zone", HOSTNAME_LABEL)
    ]
    return placement
