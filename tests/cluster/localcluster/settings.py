"""Where the local cluster keeps its files, and the names and addresses it uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.34.4"
NODE_NAME = "modelserve-node"
HOST_ADDRESS = "10.255.0.1"  # the host's end of the cable to the node
NODE_ADDRESS = "10.255.0.2"
LINK_PREFIX = 30
POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/24"
KUBERNETES_SERVICE_ADDRESS = "10.96.0.1"
API_PORT = 6443
HOST_INTERFACE = "modelserve0"
CGROUP = "modelserve"
OPERATOR_USER = "modelserve-operator"
PAUSE_IMAGE = "docker.io/library/modelserve-pause:local"
WORKER_IMAGE = "docker.io/library/modelserve-worker:local"

REPOSITORY = Path(__file__).resolve().parents[3]
GO_MODULE = Path(__file__).resolve().parents[1] / "kube"


class ClusterError(Exception):
    """The cluster cannot be started, or a part of it failed. The text names the cause and the remedy."""


def cache_dir() -> Path:
    """${MODELSERVE_CACHE:-~/.cache/modelserve}, absolute."""
    return Path(os.environ.get("MODELSERVE_CACHE") or Path.home() / ".cache" / "modelserve").resolve()


@dataclass(frozen=True)
class StateFolder:
    """Everything the running cluster writes lies below `path`; `down` removes it."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.path / "kubeconfig"

    @property
    def operator_kubeconfig(self) -> Path:
        return self.path / "operator.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"

    @property
    def weights(self) -> Path:
        """Folder behind the PersistentVolume `weights`."""
        return self.path / "weights"

    @property
    def containerd_socket(self) -> Path:
        """Lies in the node's own /run, so that its length does not depend on where the state folder is."""
        return Path("/run/containerd/containerd.sock")


def state_folder() -> StateFolder:
    return StateFolder(cache_dir() / "cluster")
