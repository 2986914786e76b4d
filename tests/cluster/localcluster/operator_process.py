"""The operator as a background process of this machine, with its own identity in the cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localcluster.processes import Process, free_ports, spawn
from localcluster.settings import OPERATOR_USER, ClusterError, Layout
from localcluster.target import Target
from modelserve_operator.cluster.kinds import CACHE_RULES, CLUSTER_RULES, NAMESPACED_RULES, OWN_RULES
from modelserve_operator.settings import DEFAULT_NAMESPACE, Settings

RECONCILES = "modelserve_operator_reconciles_total{"
_OF_ONE = re.compile(r'modelserve_condition\{name="([^"]+)",namespace="([^"]+)"')


@dataclass(frozen=True)
class OperatorProcess:
    """A started operator; `port` serves its /metrics and /healthz on 127.0.0.1."""

    layout: Layout
    process: Process
    port: int

    @classmethod
    def running(cls, layout: Layout) -> OperatorProcess | None:
        try:
            document = json.loads((layout.operator_folder / "record.json").read_text())
        except FileNotFoundError:
            return None
        found = cls(layout, Process(**document["process"]), document["port"])
        return found if found.process.alive else None

    @property
    def reconciles(self) -> int:
        """How many have ended since it was started, with whatever result."""
        return sum(int(float(line.split()[-1])) for line in self._metrics().splitlines() if line.startswith(RECONCILES))

    @property
    def reconciled(self) -> set[tuple[str, str]]:
        """Namespace and name of every ModelServe whose children it has been through since it was started."""
        return {(namespace, name) for name, namespace in _OF_ONE.findall(self._metrics())}

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 10 s."""
        self.process.terminate(timeout_s=10)
        (self.layout.operator_folder / "record.json").unlink(missing_ok=True)


def start(
    target: Target,
    *,
    timeout_s: float = 300.0,
    kubeconfig: Path | None = None,
    settings: Mapping[str, str] | None = None,
    packages: Path | None = None,
) -> OperatorProcess:
    """Start the operator unless it runs, and wait until it answers. Raises ClusterError with the end of its log.

    `kubeconfig`: another way to the cluster than the target's. `settings`: MODELSERVE_ variables beside the usual ones.
    `packages`: a folder or an archive with the packages of another release.
    """
    if (found := OperatorProcess.running(target.layout)) is not None:
        return found
    if target.local is not None:
        target.kubectl.apply(*permissions())
    layout = target.layout
    layout.operator_folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    environment = _environment(target, port) | dict(settings or {})
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    else:  # an earlier release does not know the variable, and ends
        environment.setdefault("MODELSERVE_MODEL_CACHES", "true")
    if kubeconfig is not None:
        environment["KUBECONFIG"] = str(kubeconfig)
    process = spawn([sys.executable, "-m", "modelserve_operator"], log=layout.operator_log, environment=environment)
    started = OperatorProcess(layout, process, port)
    (layout.operator_folder / "record.json").write_text(json.dumps({"process": asdict(started.process), "port": port}))
    deadline = time.monotonic() + timeout_s
    while not _answers(port):
        if not process.alive or time.monotonic() > deadline:
            started.stop()
            tail = "\n".join(layout.operator_log.read_text(errors="replace").splitlines()[-15:])
            raise ClusterError(f"the operator did not start; the end of {layout.operator_log}:\n{tail}")
        time.sleep(0.1)
    return started


def permissions() -> tuple[dict[str, Any], ...]:
    """The operator's namespace, and for its user exactly the rules that the operator states."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": DEFAULT_NAMESPACE}}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": OPERATOR_USER},
        "rules": [*NAMESPACED_RULES, *CACHE_RULES, *CLUSTER_RULES],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": OPERATOR_USER},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": OPERATOR_USER},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": OPERATOR_USER}],
    }
    keys = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}  # as the chart makes it, empty
    named = {"name": Settings.model_fields["management_secret"].default, "namespace": DEFAULT_NAMESPACE}
    # Not of the chart's name: Helm takes over nothing that is there.
    name = f"{OPERATOR_USER}-keys"
    own = {**role, "kind": "Role", "metadata": {"name": name, "namespace": DEFAULT_NAMESPACE}}
    own["rules"] = [rule for rule in OWN_RULES if rule["resources"] == ["secrets"]]
    bound = {**binding, "kind": "RoleBinding", "metadata": own["metadata"]}
    bound["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return namespace, role, binding, {**keys, "metadata": named}, own, bound


def start_rival(target: Target) -> Process:
    """Another operator beside the one that `start` knows; it is the caller's to end."""
    environment = _environment(target, *free_ports(1))
    command = [sys.executable, "-m", "modelserve_operator"]
    return spawn(command, log=target.layout.operator_folder / "rival.log", environment=environment)


def _environment(target: Target, port: int) -> dict[str, str]:
    return process_environment(target.operator_kubeconfig, port) | {
        "MODELSERVE_WORKER_IMAGE": target.worker_image,
        "MODELSERVE_IMAGE_PULL_POLICY": "IfNotPresent" if target.local is None else "Never",
        "MODELSERVE_WORKER_ACCESS": "api-proxy" if target.local is None else "pod-ip",
    }


def process_environment(kubeconfig: Path, metrics_port: int) -> dict[str, str]:
    """Of a program of the operator's that runs on this machine: what a pod would give it besides is left out."""
    # An unknown MODELSERVE_ variable stops the operator, and this program has variables of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELSERVE_")}
    return environment | {
        "KUBECONFIG": str(kubeconfig),
        "MODELSERVE_METRICS_HOST": "127.0.0.1",
        "MODELSERVE_METRICS_PORT": str(metrics_port),
    }


def stop(layout: Layout) -> bool:
    """End the operator and remove its files. False when there was none."""
    found = OperatorProcess.running(layout)
    if found is not None:
        found.stop()
    shutil.rmtree(layout.operator_folder, ignore_errors=True)
    return found is not None


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
