"""The cluster that the demo and the end-to-end tests use: the user's, or the local one."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from localcluster import lifecycle
from localcluster.binaries import Progress, program
from localcluster.kubectl import Kubectl, KubectlError
from localcluster.settings import WORKER_IMAGE, ClusterError, StateFolder, state_folder


@dataclass(frozen=True)
class Target:
    """`state` is set for the local cluster only: there, pods and Services are reachable from this machine."""

    kubectl: Kubectl
    operator_kubeconfig: Path
    worker_image: str
    state: StateFolder | None


def user_kubeconfig() -> Path | None:
    """The KUBECONFIG that the user set, unless it is the local cluster's own."""
    text = os.environ.get("KUBECONFIG")
    if not text:
        return None
    path = Path(text).expanduser().resolve()
    return None if path == state_folder().admin_kubeconfig else path


def find(progress: Progress) -> Target:
    """The user's cluster where KUBECONFIG names one, else the local one, started if need be. Raises ClusterError."""
    kubeconfig = user_kubeconfig()
    if kubeconfig is not None:
        return _users(kubeconfig)
    try:
        state = lifecycle.up(progress)
    except ClusterError as error:
        raise ClusterError(f"{error}\nTo use a cluster of your own instead, set KUBECONFIG.") from error
    kubectl = program("kubectl")
    assert kubectl is not None, "up built it"
    return Target(Kubectl(kubectl, state.admin_kubeconfig), state.operator_kubeconfig, WORKER_IMAGE, state)


def _users(kubeconfig: Path) -> Target:
    kubectl = shutil.which("kubectl") or program("kubectl")
    image = os.environ.get("MODELSERVE_WORKER_IMAGE")
    if kubectl is None:
        raise ClusterError(f"KUBECONFIG is {kubeconfig}, but there is no kubectl on PATH: install it")
    if not image:
        raise ClusterError(
            f"KUBECONFIG is {kubeconfig}: set MODELSERVE_WORKER_IMAGE to an image with modelserve[worker] installed "
            "that this cluster can pull, or unset KUBECONFIG to use a local cluster"
        )
    target = Target(Kubectl(Path(kubectl), kubeconfig), kubeconfig, image, None)
    try:
        target.kubectl.run("get", "--raw", "/readyz", "--request-timeout=10s")
    except KubectlError as error:
        raise ClusterError(f"the cluster of KUBECONFIG={kubeconfig} does not answer: {error}") from error
    return target
