"""What every pod of the product has in common: Pod Security `restricted`, scratch space, and the way to the weights."""

from __future__ import annotations

from typing import Any

from modelserve.api import ModelServeSpec
from modelserve_operator.observed.snapshot import FETCH_CONTAINER
from modelserve_operator.revisions.revision import FETCH_DRAFTER_CONTAINERS
from modelserve_operator.sources import MODELS_PATH, WEIGHTS_VOLUME, ModelSource, nth

SCRATCH_ENVIRONMENT = [
    {"name": "HOME", "value": "/tmp"},  # noqa: S108 - an emptyDir of the pod
    {"name": "XDG_CACHE_HOME", "value": "/tmp/cache"},  # noqa: S108
    {"name": "TRITON_CACHE_DIR", "value": "/tmp/triton"},  # noqa: S108
    {"name": "TORCHINDUCTOR_CACHE_DIR", "value": "/tmp/inductor"},  # noqa: S108
]
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
KERNEL_CACHE_PATH = "/var/cache/modelserve/kernels"
_KERNEL_CACHE_FOLDER = ".modelserve/kernels"  # of a claim that downloads go to
COMMIT_FILE = "/tmp/modelserve-commit"  # noqa: S108 - scratch space that the containers of a pod share
RECORDED_PATH, COMMIT_KEY = "/etc/modelserve-commit", "commit"
_DRAFTER_COMMIT_VOLUME, _DRAFTER_RECORDED_PATH = "commit-drafter", "/etc/modelserve-commit-drafter"
_SCRATCH_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108


def pod_spec(*sources: ModelSource, user_id: int | None) -> dict[str, Any]:
    """Pod-level fields and the volumes of what is read; containers are added by the caller. `user_id` None: the
    platform assigns user and groups, and a fixed one would have it refuse the pod.
    """
    read = dict.fromkeys(source.volume for source in sources)
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **({} if user_id is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user_id)),
            # Weights are many files on a shared volume: do not walk them at every mount.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *(_weights(volume, [each for each in sources if each.volume == volume]) for volume in read),
        ],
    }


def _weights(volume: str, sources: list[ModelSource]) -> dict[str, Any]:
    """A volume with the files of `sources`, which share its claim."""
    claim, image = sources[0].claim, sources[0].image
    if image is not None:
        return {"name": volume, "image": {"reference": image, "pullPolicy": "IfNotPresent"}}
    if claim is None:
        return {"name": volume, "emptyDir": {}}
    read_only = {} if any(source.downloaded for source in sources) else {"readOnly": True}
    return {"name": volume, "persistentVolumeClaim": {"claimName": claim, **read_only}}


def mount_drafters(worker: dict[str, Any], drafters: tuple[ModelSource, ...]) -> None:
    """Let a container read the drafters that do not lie beside the model."""
    for volume, path in dict.fromkeys((drafter.volume, drafter.mount_path) for drafter in drafters):
        if volume != WEIGHTS_VOLUME:
            worker["volumeMounts"].append({"name": volume, "mountPath": path, "readOnly": True})


def drafter_commit_volume(number: int) -> str:
    """Of the recorded commit of one of a plan's drafters, which count from 0."""
    return nth(_DRAFTER_COMMIT_VOLUME, number + 1)


def container(*, name: str, image: str, pull_policy: str, command: list[str]) -> dict[str, Any]:
    """A container that reads the weights and writes to /tmp only."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": command,
        "env": list(SCRATCH_ENVIRONMENT),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # a crash leaves no message of its own
        "volumeMounts": [_SCRATCH_MOUNT, {"name": "weights", "mountPath": MODELS_PATH, "readOnly": True}],
    }


def keep_compiled_kernels(worker: dict[str, Any], source: ModelSource) -> None:
    """Let compiled kernels outlive the pod, where the weights lie on a claim that this product writes to.

    Elsewhere (a claim of the user's own files, which stays read-only, or no claim) they go to scratch space, as
    SCRATCH_ENVIRONMENT has it. Pods may share the folder: entries are named by their content and appear whole.
    """
    if not source.downloaded or source.claim is None:
        return
    mount = {"name": "weights", "mountPath": KERNEL_CACHE_PATH, "subPath": _KERNEL_CACHE_FOLDER}
    worker["volumeMounts"].append(mount)
    kept = [variable for variable in worker["env"] if variable["name"] != "TRITON_CACHE_DIR"]
    worker["env"] = [*kept, {"name": "TRITON_CACHE_DIR", "value": KERNEL_CACHE_PATH}]


def environment(users: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The user's variables and ours, which win."""
    taken = {variable["name"] for variable in own}
    return [*(variable for variable in users if variable["name"] not in taken), *own]


def image_pull_secrets(spec: ModelServeSpec, operators: tuple[str, ...]) -> list[dict[str, str]]:
    """Secrets of the spec, and after them those that the operator adds to every pod."""
    return [
        {"name": name} for name in dict.fromkeys([*(each.name for each in spec.pod.image_pull_secrets), *operators])
    ]


def resolve_container(
    source: ModelSource, *, image: str, pull_policy: str, users: list[dict[str, Any]]
) -> dict[str, Any]:
    """Tells the commit that the revision of an hf:// checkpoint stands for, before the download, and reports it.

    It has the pod's volume `commit` mounted: where the operator knows the commit already, the Hub is not asked.
    """
    built = fetch_container(
        source, image=image, pull_policy=pull_policy, metadata_only=False, users=users, resolved=True
    )
    recorded = ["--resolve", "--recorded", f"{RECORDED_PATH}/{COMMIT_KEY}"]
    mounts = [
        _SCRATCH_MOUNT,
        {"name": "weights", "mountPath": MODELS_PATH, "readOnly": True},
        {"name": "commit", "mountPath": RECORDED_PATH, "readOnly": True},
    ]
    return {**built, "name": "resolve", "command": [*built["command"], *recorded], "volumeMounts": mounts}


def fetch_container(
    source: ModelSource,
    *,
    image: str,
    pull_policy: str,
    metadata_only: bool,
    users: list[dict[str, Any]],
    resolved: bool = False,
) -> dict[str, Any]:
    """The download of an hf:// checkpoint; it alone may write the weights; it and `resolve_container` see the token.

    `users`: variables of spec.pod.env, for HF_ENDPOINT, HTTPS_PROXY or SSL_CERT_FILE. `resolved`: another container of
    the pod has left the commit in COMMIT_FILE.
    """
    command = _fetch_command(source)
    if resolved:
        command += ["--commit-file", COMMIT_FILE]
    built = container(
        name=FETCH_CONTAINER,
        image=image,
        pull_policy=pull_policy,
        command=[*command, "--metadata-only"] if metadata_only else command,
    )
    built["volumeMounts"] = [_SCRATCH_MOUNT, {"name": "weights", "mountPath": MODELS_PATH}]
    _let_download(built, source, users)
    return built


def fetch_drafter_container(
    source: ModelSource, *, number: int, image: str, pull_policy: str, users: list[dict[str, Any]]
) -> dict[str, Any]:
    """The download of drafter `number` of a plan, from 0, which ends well whatever comes of it: the worker serves
    without one that is not there. It tells the commit, or what went wrong. Where the revision may move, the pod's
    volume of the recorded commit is mounted.
    """
    command = [*_fetch_command(source), "--optional"]
    mounts: list[dict[str, Any]] = [_SCRATCH_MOUNT, {"name": source.volume, "mountPath": source.mount_path}]
    if source.moves:
        recorded = nth(_DRAFTER_RECORDED_PATH, number + 1)
        command += ["--recorded", f"{recorded}/{COMMIT_KEY}"]
        mounts.append({"name": drafter_commit_volume(number), "mountPath": recorded, "readOnly": True})
    built = container(name=FETCH_DRAFTER_CONTAINERS[number], image=image, pull_policy=pull_policy, command=command)
    built["volumeMounts"] = mounts
    _let_download(built, source, users)
    return built


def cache_container(
    source: ModelSource, *, image: str, pull_policy: str, command: list[str], users: list[dict[str, Any]]
) -> dict[str, Any]:
    """Fills or frees a cache: it may write the volume, and sees the token of `source`."""
    built = container(name=FETCH_CONTAINER, image=image, pull_policy=pull_policy, command=command)
    built["volumeMounts"] = [_SCRATCH_MOUNT, {"name": source.volume, "mountPath": source.mount_path}]
    _let_download(built, source, users)
    return built


def _fetch_command(source: ModelSource) -> list[str]:
    assert source.revision is not None, "only hf:// checkpoints are downloaded"
    return [
        "modelserve-worker", "fetch", "--uri", source.uri, "--revision", source.revision, "--dest", source.directory,
    ]  # fmt: skip


def _let_download(built: dict[str, Any], source: ModelSource, users: list[dict[str, Any]]) -> None:
    """The token, and the user's variables for the way to the Hub."""
    if source.token is not None:
        name, key = source.token
        built["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    built["env"] = environment([each for each in users if each["name"] != "HF_HUB_OFFLINE"], built["env"])
