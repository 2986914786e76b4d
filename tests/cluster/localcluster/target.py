"""The cluster that the demo and the end-to-end tests use: the user's, or the local one."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from localcluster import lifecycle
from localcluster.binaries import Progress, programs_folder
from localcluster.kubectl import Kubectl, KubectlError
from localcluster.node_profile import PLAIN, NodeProfile
from localcluster.settings import CLUSTERS, WORKER_IMAGE, ClusterError, Layout


@dataclass(frozen=True)
class Target:
    """`local` is set for a local cluster only: there, pods and Services are reachable from this machine."""

    kubectl: Kubectl
    operator_kubeconfig: Path
    worker_image: str
    local: Layout | None
    layout: Layout


def user_kubeconfig() -> Path | None:
    """The KUBECONFIG that the user set, unless it is a local cluster's own."""
    text = os.environ.get("KUBECONFIG")
    if not text:
        return None
    path = Path(text).expanduser().resolve()
    return None if path in {Layout(name).admin_kubeconfig for name in CLUSTERS} else path


def find(layout: Layout, progress: Progress, profile: NodeProfile = PLAIN) -> Target:
    """The user's cluster where KUBECONFIG names one, else `layout`, started if need be with a node of this `profile`.
    Raises ClusterError."""
    kubeconfig = user_kubeconfig()
    if kubeconfig is not None:
        return _users(kubeconfig, layout)
    try:
        return local(layout, progress, profile)
    except ClusterError as error:
        raise ClusterError(f"{error}\nTo use a cluster of your own instead, set KUBECONFIG.") from error


def local(layout: Layout, progress: Progress, profile: NodeProfile = PLAIN) -> Target:
    """The local cluster, started unless it runs. Raises ClusterError."""
    lifecycle.up(layout, progress, profile)
    programs = programs_folder()
    assert programs is not None, "up built them"
    return Target(
        Kubectl(programs / "kubectl", layout.admin_kubeconfig), layout.operator_kubeconfig, WORKER_IMAGE, layout, layout
    )


def _users(kubeconfig: Path, layout: Layout) -> Target:
    built = programs_folder()
    kubectl = shutil.which("kubectl") or (built / "kubectl" if built else None)
    image = os.environ.get("MODELSERVE_WORKER_IMAGE")
    if kubectl is None:
        raise ClusterError(f"KUBECONFIG is {kubeconfig}, but there is no kubectl on PATH: install it")
    if not image:
        raise ClusterError(
            f"KUBECONFIG is {kubeconfig}: set MODELSERVE_WORKER_IMAGE to an image with modelserve[worker] installed "
            "that this cluster can pull, or unset KUBECONFIG to use a local cluster"
        )
    target = Target(Kubectl(Path(kubectl), kubeconfig), kubeconfig, image, None, layout)
    try:
        target.kubectl.run("get", "--raw", "/readyz", "--request-timeout=10s")
    except KubectlError as error:
        raise ClusterError(f"the cluster of KUBECONFIG={kubeconfig} does not answer: {error}") from error
    return target
