"""A namespace that enforces Pod Security `restricted`, with a claim `weights` that holds small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localcluster.kubectl import condition, wait_for
from localcluster.settings import NODE_NAME, ClusterError
from localcluster.target import Target

CLAIM = "weights"
MOUNT = "/models"
_SIZE = "10Gi"


def create_namespace(target: Target, namespace: str, *, folder: Path | None = None) -> None:
    """Create the namespace and its claim. On the local cluster the claim is bound to `folder`, or one of its state."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    target.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": _SIZE}}},
    }
    if target.local is None:
        if not target.kubectl.exists("persistentvolumeclaim", CLAIM, "-n", namespace):
            target.kubectl.apply(claim)
        return
    if folder is None:
        folder = target.local.weights / namespace
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    volume_name = f"{CLAIM}-{namespace}"
    on_the_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            "capacity": {"storage": _SIZE},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": CLAIM, "namespace": namespace},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_the_node]}]}},
        },
    }
    claim["spec"] |= {"storageClassName": "", "volumeName": volume_name}
    target.kubectl.apply(volume, claim)


def delete_namespace(target: Target, namespace: str) -> None:
    target.kubectl.delete("namespace", namespace)
    if target.local is not None:
        target.kubectl.delete("persistentvolume", f"{CLAIM}-{namespace}")


def pod_spec(target: Target, *, name: str, command: list[str]) -> dict[str, Any]:
    """A pod that runs `command` once in the worker image, with the claim mounted at MOUNT. It passes `restricted`."""
    container = {
        "name": name,
        "image": target.worker_image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "models", "mountPath": MOUNT}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def run_job(target: Target, namespace: str, *, name: str, command: list[str]) -> None:
    """Run `command` in the worker image with the claim mounted at MOUNT. Raises ClusterError with the log's end."""
    kubectl = target.kubectl
    kubectl.delete("job", name, "-n", namespace)
    kubectl.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"backoffLimit": 0, "template": {"spec": pod_spec(target, name=name, command=command)}},
        }
    )

    def ended() -> bool:
        job = kubectl.get("job", name, "-n", namespace)
        if condition(job, "Failed").get("status") == "True":
            log = kubectl.run("logs", f"job/{name}", "-n", namespace, "--tail=20")
            raise ClusterError(f"Job {name} in namespace {namespace} failed; the end of its log:\n{log}")
        return condition(job, "Complete").get("status") == "True"

    wait_for(f"Job {name} in namespace {namespace}", ended)
    kubectl.delete("job", name, "-n", namespace)
