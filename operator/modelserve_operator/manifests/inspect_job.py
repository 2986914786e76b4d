"""The Job that reads an unknown model's config.json and safetensors headers, and answers in its termination message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelserve import __version__
from modelserve.api import ModelServeSpec
from modelserve.hardware import ARCH_LABEL, IMAGE_ARCHITECTURES
from modelserve.releases import release_number, release_of_image
from modelserve.termination import TERMINAL_EXIT_CODE, TERMINATION_MESSAGE_PATH
from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.manifests.pod_resources import INSPECT_RESOURCES
from modelserve_operator.manifests.restricted_pod import container, fetch_container, image_pull_secrets, pod_spec
from modelserve_operator.observed.snapshot import Body
from modelserve_operator.sources import ModelSource

RETRIES = 3
DEADLINE_SECONDS = 600  # of its pods together, once it is let in: it reads megabytes, and a hung volume says nothing
GPU_RUNTIME = "nvidia"  # as NVIDIA's toolkit names its RuntimeClasses, whose handlers nodes without GPUs lack
NEVER_READY = f"{labels.GROUP}/never-ready"  # a condition that nobody sets: no Service takes the pod for a worker
IDENTITY_SINCE = "0.2.0"  # release of the image that knows `inspect --identity`


def inspect_job(
    model_serve: Body,
    spec: ModelServeSpec,
    *,
    source: ModelSource,
    image: str,
    pull_policy: str,
    pull_secrets: tuple[str, ...] = (),
    attempts: int = 1,
    architectures: tuple[str, ...] = IMAGE_ARCHITECTURES,
    user_id: int | None,
) -> dict[str, Any]:
    """A Job without GPUs. Exit code TERMINAL_EXIT_CODE fails it at once; other failures are tried RETRIES times again.

    `attempts`: how many Jobs have been made for this model in a row, this one counted. Its nodes have
    CPUs of the image's `architectures`.

    Of an hf:// checkpoint metadata and the headers of weight files are fetched, into scratch space: the storage claim
    is left alone. What spec.pod adds to pods reaches this one too, so that it can be kept out of a mesh, or be let in
    by a queue, which looks at the Job; it is never Ready, so that a Service over the user's labels leaves it out.
    """
    name = labels.inspection_name(model_serve["metadata"]["name"], source.hash)
    metadata = child_metadata(model_serve, name=name, component=labels.INSPECTION)
    if source.downloaded:
        source = replace(source, claim=None)
    release = release_of_image(image) or __version__
    identity = ["--identity"] if release_number(release) >= release_number(IDENTITY_SINCE) else []
    about = ["--drafter"] if source.drafter else identity
    inspect = container(
        name="inspect",
        image=image,
        pull_policy=pull_policy,
        command=["modelserve", "inspect", source.directory, "--output", TERMINATION_MESSAGE_PATH, *about],
    )
    inspect["resources"] = INSPECT_RESOURCES
    pod: dict[str, Any] = {**pod_spec(source, user_id=user_id), "restartPolicy": "Never", "containers": [inspect]}
    if source.downloaded:
        users = spec.pod.to_json().get("env") or []
        fetch = fetch_container(source, image=image, pull_policy=pull_policy, metadata_only=True, users=users)
        pod["initContainers"] = [{**fetch, "resources": INSPECT_RESOURCES}]
    runs = {"matchExpressions": [{"key": ARCH_LABEL, "operator": "In", "values": list(architectures)}]}
    required = {"nodeSelectorTerms": [runs]}
    pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    options = spec.pod.to_json()
    pod["readinessGates"] = [{"conditionType": NEVER_READY}]
    for option in ("tolerations", "serviceAccountName", "priorityClassName", "runtimeClassName"):
        if options.get(option):
            pod[option] = options[option]
    if pod.get("runtimeClassName", "").startswith(GPU_RUNTIME):
        del pod["runtimeClassName"]
    if secrets := image_pull_secrets(spec, pull_secrets):
        pod["imagePullSecrets"] = secrets
    on_terminal_exit = {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [TERMINAL_EXIT_CODE]},
    }
    users, own = options.get("labels") or {}, metadata["labels"]
    about_pod: dict[str, Any] = {"labels": {**users, **own}}
    if options.get("annotations"):
        about_pod["annotations"] = options["annotations"]
    metadata["labels"] = {**{key: value for key, value in users.items() if key.startswith(labels.KUEUE)}, **own}
    body = {
        "backoffLimit": RETRIES,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "podFailurePolicy": {"rules": [on_terminal_exit]},
        "template": {"metadata": about_pod, "spec": pod},
    }
    asked = labels.annotation_of(model_serve, labels.RETRY)
    metadata["annotations"] = {
        labels.ATTEMPTS: str(attempts),
        labels.MADE_FROM: labels.short_hash([metadata["labels"], body]),
        **({labels.RETRY: asked} if asked is not None else {}),
    }
    return {"metadata": metadata, "spec": body}
