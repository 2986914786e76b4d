"""Helm against one cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster.settings import KUBERNETES_VERSION, REPOSITORY, ClusterError

CHART = REPOSITORY / "charts" / "modelserve"


class HelmError(ClusterError):
    """helm exited with another status than 0; the text is what it wrote."""


@dataclass(frozen=True)
class Helm:
    """One release of the chart, in its namespace. Without a kubeconfig only `template` and `lint` work."""

    program: Path
    release: str = "modelserve"
    namespace: str = "modelserve-system"
    kubeconfig: Path | None = None

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None, timeout_s: float = 600.0) -> str:
        """Standard output. `values` are given as a file. Raises HelmError."""
        command = [str(self.program), *arguments, f"--namespace={self.namespace}"]
        if self.kubeconfig is not None:
            command.append(f"--kubeconfig={self.kubeconfig}")
        if values is not None:
            command.append("--values=-")
        done = subprocess.run(
            command,
            input=json.dumps(values) if values is not None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def install(self, values: Mapping[str, Any]) -> None:
        """Install, and wait until the operator is Ready."""
        self.run("install", self.release, str(CHART), "--wait", "--timeout=480s", values=values)

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Upgrade to exactly these values, and wait until the operator is Ready."""
        self.run("upgrade", self.release, str(CHART), "--wait", "--timeout=480s", "--reset-values", values=values)

    def rollback(self, revision: int) -> None:
        self.run("rollback", self.release, str(revision), "--wait", "--timeout=480s")

    def uninstall(self) -> None:
        self.run("uninstall", self.release, "--wait", "--timeout=480s")

    def manifest(self) -> str:
        """What Helm keeps as the release's objects; hooks are none of them."""
        return self.run("get", "manifest", self.release)

    def template(self, values: Mapping[str, Any], *, served: Sequence[str] = ()) -> str:
        """All objects, hooks included, as YAML documents; `served`: APIs of the cluster beside Kubernetes' own."""
        version = f"--kube-version={KUBERNETES_VERSION}"
        apis = [f"--api-versions={each}" for each in served]
        return self.run("template", self.release, str(CHART), version, *apis, values=values)

    def lint(self, values: Mapping[str, Any]) -> str:
        version = f"--kube-version={KUBERNETES_VERSION}"
        return self.run("lint", str(CHART), "--strict", version, values=values)
