"""The Jobs of a ModelCache, which fetch it and remove it again, and the claim that is made for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.caches.model_cache import ModelCacheSpec, VolumeStorage
from modelserve.hardware import ARCH_LABEL
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_CACHE
from modelserve_operator.manifests.pod_resources import CACHE_RESOURCES
from modelserve_operator.manifests.restricted_pod import cache_container, pod_spec
from modelserve_operator.observed.snapshot import Body
from modelserve_operator.sources import MODELS_PATH, ModelSource, cache_claim, cache_folder

RETRIES = 6  # of pods of one Job: each goes on where the one before stopped
PORT = 8000  # where a pod tells its progress


@dataclass(frozen=True)
class JobImage:
    """What an installation sets for the pods."""

    image: str
    pull_policy: str
    pull_secrets: tuple[str, ...]
    architectures: tuple[str, ...]
    user_id: int | None


def claim(cache: Body, volume: VolumeStorage) -> dict[str, Any]:
    """PersistentVolumeClaim NAME-cache."""
    spec: dict[str, Any] = {
        "accessModes": list(volume.access_modes),
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.storage_class_name is not None:
        spec["storageClassName"] = volume.storage_class_name
    return {"metadata": _metadata(cache, labels.cache_claim_name(cache["metadata"]["name"])), "spec": spec}


def fill_job(
    cache: Body,
    spec: ModelCacheSpec,
    job: JobImage,
    *,
    asked: str,
    attempts: int,
    keep: Iterable[str],
    verify: bool,
) -> dict[str, Any]:
    """A Job that brings what the revision stands for to the claim, and removes commits but those of `keep`. One whose
    pods end for good fails at once; others are tried again."""
    command = ["fill", "--uri", spec.uri, "--revision", spec.revision or "main", "--port", str(PORT)]
    command += ["--connections", str(spec.connections)]
    for commit in sorted(keep):
        command += ["--keep", commit]
    if verify:
        command.append("--verify")
    return _job(cache, spec, job, "fill", command, asked=asked, attempts=attempts)


def free_job(cache: Body, spec: ModelCacheSpec, job: JobImage, *, attempts: int) -> dict[str, Any]:
    """A Job that removes all of the cache from a claim that others use as well."""
    return _job(cache, spec, job, "free", ["free"], asked="", attempts=attempts)


def _job(
    cache: Body, spec: ModelCacheSpec, job: JobImage, task: str, command: list[str], *, asked: str, attempts: int
) -> dict[str, Any]:
    name = cache["metadata"]["name"]
    token = (spec.secret_ref.name, spec.secret_ref.key) if spec.secret_ref is not None and task == "fill" else None
    source = ModelSource(spec.uri, spec.revision, cache_claim(name, spec.storage), MODELS_PATH, token)
    root = f"{MODELS_PATH}/{cache_folder(name)}"
    options = spec.pod.to_json()
    fetch = cache_container(
        source,
        image=job.image,
        pull_policy=job.pull_policy,
        command=["modelserve-worker", "cache", *command, "--root", root],
        users=options.get("env") or [],
    )
    fetch["ports"] = [{"name": "progress", "containerPort": PORT, "protocol": "TCP"}]
    fetch["resources"] = CACHE_RESOURCES
    runs = {"matchExpressions": [{"key": ARCH_LABEL, "operator": "In", "values": list(job.architectures)}]}
    required = {"nodeSelectorTerms": [runs]}
    pod: dict[str, Any] = {
        **pod_spec(source, user_id=job.user_id),
        "restartPolicy": "Never",
        "containers": [fetch],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
    }
    if options.get("tolerations"):
        pod["tolerations"] = options["tolerations"]
    secrets = dict.fromkeys([*(each.name for each in spec.pod.image_pull_secrets), *job.pull_secrets])
    if secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in secrets]
    for_good = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [TERMINAL_EXIT_CODE]}}
    moved = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    body = {
        "backoffLimit": RETRIES,
        "podFailurePolicy": {"rules": [for_good, moved]},
        "template": {"metadata": {"labels": labels.cache_child(name, **{labels.CACHE_TASK: task})}, "spec": pod},
    }
    made_for = labels.short_hash([cache["metadata"]["uid"], asked, attempts, cache["metadata"].get("generation"), body])
    metadata = _metadata(cache, labels.cache_job_name(name, task, made_for), **{labels.CACHE_TASK: task})
    metadata["annotations"] = {labels.ASKED: asked, labels.ATTEMPTS: str(attempts)}
    return {"metadata": metadata, "spec": body}


def _metadata(cache: Mapping[str, Any], name: str, **extra: str) -> dict[str, Any]:
    owner = cache["metadata"]
    reference = {
        "apiVersion": MODEL_CACHE.api_version,
        "kind": MODEL_CACHE.kind,
        "name": owner["name"],
        "uid": owner["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": owner["namespace"],
        "labels": labels.cache_child(owner["name"], **extra),
        "ownerReferences": [reference],
    }
