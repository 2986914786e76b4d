"""Where the local cluster keeps its files, and the names and addresses it uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

KUBERNETES_VERSION = "1.34.4"
NODE_NAME = "modelserve-node"
API_PORT = 6443
CLUSTERS = ("demo", "test", "scratch", "gpu")  # may run side by side: addresses and names carry the index
OPERATOR_USER = "modelserve-operator"
WEBHOOK_USER = "modelserve-webhook"
ADMIN_USER = "admin"  # the tests' own kubectl
RELEASE_NAMESPACES = ("modelserve-system", "modelserve-tenant")  # the audit log has all that operators there ask for
IMAGE_RUNTIME = "image"  # handler of a RuntimeClass: containers see their image and nothing else
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
class Layout:
    """Names, addresses and files of one local cluster. Everything it writes lies below `path`; `down` removes it."""

    name: str
    cache: Path = field(default_factory=cache_dir)

    def __post_init__(self) -> None:
        if self.name not in CLUSTERS:
            raise ClusterError(f"there is no local cluster {self.name!r}; choose one of {', '.join(CLUSTERS)}")

    @property
    def index(self) -> int:
        return CLUSTERS.index(self.name)

    @property
    def path(self) -> Path:
        return self.cache / f"cluster-{self.name}"

    @property
    def operator_folder(self) -> Path:
        """Pid and log of the operator that runs beside the cluster."""
        return self.cache / f"operator-{self.name}"

    @property
    def operator_log(self) -> Path:
        return self.operator_folder / "operator.log"

    @property
    def host_address(self) -> str:
        """The host's end of the cable to the node."""
        return f"10.255.{self.index}.1"

    @property
    def node_address(self) -> str:
        return f"10.255.{self.index}.2"

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def service_range(self) -> str:
        return f"10.96.{self.index}.0/24"

    @property
    def kubernetes_service_address(self) -> str:
        """The first address of the Service range; the API server takes it for itself."""
        return f"10.96.{self.index}.1"

    @property
    def api_server_url(self) -> str:
        return f"https://{self.node_address}:{API_PORT}"

    @property
    def host_interface(self) -> str:
        return f"modelserve{self.index}"

    @property
    def cgroup(self) -> str:
        return f"modelserve-{self.name}"

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
