"""The Job that reads an unknown model's config.json and safetensors headers, and answers in its termination message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelserve import __version__
from modelserve.api import ModelServeSpec
from modelserve.releases import release_number, release_of_image
from modelserve.termination import TERMINAL_EXIT_CODE, TERMINATION_MESSAGE_PATH
from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.manifests.pod_resources import INSPECT_RESOURCES
from modelserve_operator.manifests.restricted_pod import container, fetch_container, image_pull_secrets, pod_spec
from modelserve_operator.observed import Body
from modelserve_operator.sources import ModelSource

RETRIES = 3
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
    user_id: int | None,
) -> dict[str, Any]:
    """A Job without GPUs. Exit code TERMINAL_EXIT_CODE fails it at once; other failures are tried RETRIES times again.

    `attempts`: how many Jobs have been made for this model in a row, this one counted.

    Of an hf:// checkpoint metadata and the headers of weight files are fetched, into scratch space: the storage claim
    is left alone.
    """
    name = labels.inspection_name(model_serve["metadata"]["name"], source.hash)
    metadata = child_metadata(model_serve, name=name, component=labels.INSPECTION)
    asked = labels.annotation_of(model_serve, labels.RETRY)
    metadata["annotations"] = {labels.ATTEMPTS: str(attempts), **({labels.RETRY: asked} if asked is not None else {})}
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
    options = spec.pod.to_json()
    for option in ("tolerations", "serviceAccountName", "priorityClassName"):
        if options.get(option):
            pod[option] = options[option]
    if secrets := image_pull_secrets(spec, pull_secrets):
        pod["imagePullSecrets"] = secrets
    on_terminal_exit = {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [TERMINAL_EXIT_CODE]},
    }
    return {
        "metadata": metadata,
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {"rules": [on_terminal_exit]},
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": pod},
        },
    }
