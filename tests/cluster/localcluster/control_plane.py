"""etcd and an API server by themselves, in one folder and on free loopback ports: no node, no controller, no root.

What is written there stays as it is: nothing runs pods, and nothing collects the children of what is deleted.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from localcluster.binaries import require_programs
from localcluster.certificates import CertificateAuthority
from localcluster.components import AUDIT_POLICY
from localcluster.crds import install_crds
from localcluster.kubectl import Kubectl
from localcluster.processes import Process, free_ports, spawn
from localcluster.settings import OPERATOR_USER, WEBHOOK_USER, ClusterError

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ControlPlane:
    """A running API server; certificates and the audit log (writes by user, no bodies) lie in `folder`."""

    folder: Path
    url: str
    kubectl: Kubectl
    processes: dict[str, Process]

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def operator_kubeconfig(self) -> Path:
        return self.folder / "operator.kubeconfig"

    @property
    def webhook_kubeconfig(self) -> Path:
        return self.folder / "webhook.kubeconfig"

    def admin_tls(self) -> ssl.SSLContext:
        """For requests as administrator."""
        certificates = self.folder / "certificates"
        context = ssl.create_default_context(cafile=certificates / "ca.crt")
        context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
        return context


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """An API server with the product's CRDs, for as long as the context lasts. Raises ClusterError."""
    programs = require_programs(lambda _: None)
    with tempfile.TemporaryDirectory(prefix="modelserve-control-plane-") as name:
        folder, (api, etcd, peers) = Path(name), free_ports(3)
        url = f"https://127.0.0.1:{api}"
        _write_files(folder, url)
        kubectl = Kubectl(programs["kubectl"], folder / "admin.kubeconfig")
        lines = _commands(folder, programs, api=api, etcd=etcd, peers=peers)
        environment = os.environ | {"GOGC": "400"}  # memory for time: a third of their CPU goes into collecting garbage
        started: dict[str, Process] = {}
        try:
            for program, line in lines.items():
                started[program] = spawn(line, log=folder / f"{program}.log", environment=environment)
            plane = ControlPlane(folder, url, kubectl, started)
            _wait_until_ready(plane)
            install_crds(kubectl)
            yield plane
        finally:
            for process in reversed(started.values()):
                process.terminate(timeout_s=20)


def _write_files(folder: Path, url: str) -> None:
    authority = CertificateAuthority.create(folder / "certificates")
    authority.issue_key_pair("service-accounts")
    authority.issue_server("apiserver", ["127.0.0.1", "localhost"])
    users = (("admin", "admin", "system:masters"), ("operator", OPERATOR_USER, None), ("webhook", WEBHOOK_USER, None))
    for client, user, group in users:
        authority.issue_client(client, user=user, group=group)
        authority.write_kubeconfig(folder / f"{client}.kubeconfig", client=client, server=url)
    (folder / "audit.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))


def _commands(folder: Path, programs: dict[str, Path], *, api: int, etcd: int, peers: int) -> dict[str, list[str]]:
    certificates, etcd_url = folder / "certificates", f"http://127.0.0.1:{etcd}"
    return {
        "etcd": [
            str(programs["etcd"]),
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            str(programs["kube-apiserver"]),
            f"--etcd-servers={etcd_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api}",
            f"--cert-dir={certificates}",
            f"--tls-cert-file={certificates}/apiserver.crt",
            f"--tls-private-key-file={certificates}/apiserver.key",
            f"--client-ca-file={certificates}/ca.crt",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates}/service-accounts.pub",
            f"--service-account-signing-key-file={certificates}/service-accounts.key",
            "--disable-admission-plugins=ServiceAccount",
            "--authorization-mode=RBAC",
            "--feature-gates=ImageVolume=true",  # on by itself in newer releases
            f"--audit-policy-file={folder}/audit.yaml",
            f"--audit-log-path={folder}/audit.log",
        ],
    }


def _wait_until_ready(plane: ControlPlane) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    probe = [str(plane.kubectl.program), f"--kubeconfig={plane.kubectl.kubeconfig}", "get", "--raw", "/readyz"]
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        dead = next((name for name, process in plane.processes.items() if not process.alive), None)
        if dead or time.monotonic() > deadline:
            log = plane.folder / f"{dead or 'kube-apiserver'}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ClusterError(f"{dead or 'the API server'} did not start; the end of its log:\n{tail}")
        time.sleep(0.2)
