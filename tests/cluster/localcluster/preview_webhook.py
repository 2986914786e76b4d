"""The preview webhook as a process of this machine beside a control plane, with the chart's objects and rights."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from localcluster.binaries import require_tool
from localcluster.control_plane import ControlPlane
from localcluster.helm import Helm
from localcluster.kubectl import wait_for
from localcluster.operator_process import process_environment
from localcluster.processes import Process, free_ports, spawn
from localcluster.settings import WEBHOOK_USER, ClusterError
from modelserve_operator.settings import DEFAULT_NAMESPACE
from modelserve_operator.webhook.server import PATH

NAME = "modelserve-operator-webhook"
CONFIGURATION = f"{DEFAULT_NAMESPACE}-{NAME}"


@dataclass(frozen=True)
class PreviewWebhook:
    """`port`: HTTPS for reviews; `metrics`: port of /metrics; both on 127.0.0.1."""

    process: Process
    port: int
    metrics: int
    log: Path

    def counted(self, outcome: str) -> int:
        """Reviews that ended so."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = f'modelserve_webhook_reviews_total{{outcome="{outcome}"}}'
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def chart_objects(**webhook: Any) -> list[dict[str, Any]]:
    """What the chart makes for the webhook, but for its pods and what only pods need."""
    helm = Helm(require_tool("helm", lambda _: None))
    values = {"webhook": {"enabled": True, **webhook}}
    rendered = [each for each in yaml.safe_load_all(helm.template(values)) if each]
    kinds = {"Secret", "ValidatingWebhookConfiguration", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    return [each for each in rendered if each["kind"] in kinds and each["metadata"]["name"].endswith(NAME)]


def at_url(body: dict[str, Any], port: int, *, waits_s: int = 30) -> dict[str, Any]:
    """The configuration, for a webhook of this machine in place of a Service. It waits longer than the chart's second:
    what is printed must not depend on what else the machine does.
    """
    here = {"timeoutSeconds": waits_s, "clientConfig": {"url": f"https://127.0.0.1:{port}{PATH}"}}
    return {**body, "webhooks": [{**hook, **here} for hook in body["webhooks"]]}


def install(plane: ControlPlane, port: int) -> None:
    """The chart's objects, with the rights of its service account for the user of the process."""
    plane.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": DEFAULT_NAMESPACE}})
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": WEBHOOK_USER}
    for body in chart_objects():
        if body["kind"] == "ValidatingWebhookConfiguration":
            body = at_url(body, port)
        plane.kubectl.apply(body | ({"subjects": [user]} if "subjects" in body else {}))


def start(plane: ControlPlane, *, port: int, log: Path) -> PreviewWebhook:
    """Start the process, and wait until it answers. Raises ClusterError with the end of its log."""
    (metrics,) = free_ports(1)
    environment = process_environment(plane.webhook_kubeconfig, metrics) | {
        "MODELSERVE_WEBHOOK_HOST": "127.0.0.1",
        "MODELSERVE_WEBHOOK_PORT": str(port),
        "MODELSERVE_WEBHOOK_HOSTS": "127.0.0.1",
        "MODELSERVE_WEBHOOK_SECRET": NAME,
        "MODELSERVE_WEBHOOK_CONFIGURATION": CONFIGURATION,
    }
    process = spawn([sys.executable, "-m", "modelserve_operator.webhook"], log=log, environment=environment)

    def answering() -> bool:
        if not process.alive:
            raise ClusterError(f"the webhook ended:\n{log.read_text(errors='replace')[-2000:]}")
        return f"answering reviews on port {port}" in log.read_text(errors="replace")

    wait_for("the webhook answers", answering)
    return PreviewWebhook(process, port, metrics, log)


@contextmanager
def preview_webhook(plane: ControlPlane) -> Iterator[PreviewWebhook]:
    """The webhook, installed and answering, for as long as the context lasts."""
    (port,) = free_ports(1)
    install(plane, port)
    webhook = start(plane, port=port, log=plane.folder / "webhook.log")
    try:
        yield webhook
    finally:
        webhook.process.terminate(timeout_s=20)
