"""Checkpoints of this machine, copied onto the volume of a namespace: any cluster that kubectl reaches will do."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from localcluster import checkpoint_receiver
from localcluster.kubectl import Kubectl, wait_for
from localcluster.settings import ClusterError
from localcluster.target import Target
from localcluster.weights_volume import MOUNT, pod_spec

POD = "checkpoint-upload"
_LIFETIME_S = 600  # the pod ends by itself when this program is killed
_START_TIMEOUT_S = 300.0  # pulling the image included
_RECEIVER = Path(checkpoint_receiver.__file__).read_text()


def upload_checkpoint(target: Target, namespace: str, directory: Path) -> bool:
    """Copy the files of `directory` to pvc://weights/NAME, under its own name; False when they are there already.

    A worker that has read the folder does not notice that it changed. Raises ClusterError.
    """
    if not directory.is_dir():
        raise ClusterError(f"there is no checkpoint at {directory}: restore it from the repository")
    folder = f"{MOUNT}/{directory.name}"
    expected = checkpoint_receiver.content_hash(directory)
    with _pod(target, namespace) as kubectl:
        receiver = (POD, "--", "python", "-c", _RECEIVER, folder)
        if kubectl.run("exec", *receiver).strip() == expected:
            return False
        with tempfile.TemporaryFile() as archive:
            pack(directory, archive)
            archive.seek(0)
            kubectl.run("exec", "-i", *receiver, expected, stdin=archive, timeout_s=_LIFETIME_S)
    return True


def pack(directory: Path, file: IO[bytes]) -> None:
    """A tar archive of the directory's files, with what differs between checkouts left out."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        return entry.replace(mode=0o644, uid=0, gid=0, uname="", gname="", deep=False)

    with tarfile.open(fileobj=file, mode="w", dereference=True) as archive:  # checkpoints of tests share a tokenizer
        for path in checkpoint_receiver.files(directory):
            archive.add(path, arcname=path.relative_to(directory).as_posix(), filter=plain)


@contextmanager
def _pod(target: Target, namespace: str) -> Iterator[Kubectl]:
    """A pod that waits with the claim mounted, for as long as the context lasts."""
    kubectl = target.kubectl.within(namespace)
    # A pod is refused until its namespace, which may have been made just now, has this account.
    account = ("serviceaccount", "default")
    wait_for(f"{' '.join(account)} of namespace {namespace}", lambda: kubectl.exists(*account))
    kubectl.delete("pod", POD)
    spec = pod_spec(target, name=POD, command=["python", "-c", "import signal; signal.pause()"])
    limits = {"activeDeadlineSeconds": _LIFETIME_S, "terminationGracePeriodSeconds": 0}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD}, "spec": spec | limits})
    try:
        try:
            wait_for(f"pod {POD} running", lambda: _running(kubectl), timeout_s=_START_TIMEOUT_S)
        except ClusterError as error:
            events = kubectl.run("get", "events", f"--field-selector=involvedObject.name={POD}")
            raise ClusterError(f"{error}; its events in namespace {namespace}:\n{events}") from error
        yield kubectl
    finally:
        kubectl.delete("pod", POD)


def _running(kubectl: Kubectl) -> bool:
    phase = kubectl.get("pod", POD)["status"].get("phase")
    if phase == "Failed":
        raise ClusterError(f"pod {POD} failed")
    return bool(phase == "Running")
