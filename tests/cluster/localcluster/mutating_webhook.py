"""A mutating admission webhook as OTel, Datadog and Kyverno have one: it adds a variable to containers."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from localcluster.certificates import CertificateAuthority
from localcluster.kubectl import Kubectl, wait_for

VARIABLE = {"name": "AGENT_HOST", "value": "10.0.0.1"}
CONFIGURATION = "adds-env"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = review["request"]
        answer: dict[str, Any] = {"uid": request["uid"], "allowed": True}
        operations = _operations(request["object"])
        if operations:
            patch = base64.b64encode(json.dumps(operations).encode()).decode()
            answer |= {"patchType": "JSONPatch", "patch": patch}
        content = json.dumps({**{key: review[key] for key in ("apiVersion", "kind")}, "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, *answered: object) -> None:
        pass


def _operations(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    """A JSON patch that gives every container of the template the variable, unless it has it."""
    found: list[dict[str, Any]] = []
    for place, container in enumerate(deployment["spec"]["template"]["spec"]["containers"]):
        path = f"/spec/template/spec/containers/{place}/env"
        if VARIABLE not in container.get("env", []):
            if "env" not in container:
                found.append({"op": "add", "path": path, "value": []})
            found.append({"op": "add", "path": f"{path}/-", "value": VARIABLE})
    return found


@contextmanager
def adds_env_to_deployments(kubectl: Kubectl, *, host: str, folder: Path, namespace: str) -> Iterator[None]:
    """Every write of a Deployment of the namespace passes the webhook while the context lasts.

    `host`: an address of this machine that the API server reaches; `folder`: for its certificates, made anew.
    """
    authority = CertificateAuthority.create(folder)
    authority.issue_server("webhook", [host])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "webhook.crt", folder / "webhook.key")
    with ThreadingHTTPServer((host, 0), _Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            kubectl.apply(_configuration(f"https://{host}:{server.server_address[1]}/", folder, namespace))
            wait_for("the webhook in force", lambda: _in_force(kubectl, namespace))
            yield
        finally:
            kubectl.delete("mutatingwebhookconfiguration", CONFIGURATION)
            wait_for("the webhook no longer asked", lambda: not _in_force(kubectl, namespace))
            server.shutdown()
            thread.join()


def _in_force(kubectl: Kubectl, namespace: str) -> bool:
    """Whether the API server, which hears of configurations by a watch, asks the webhook about a Deployment."""
    labels = {"app": CONFIGURATION}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "none", "image": "none"}]}}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": CONFIGURATION, "namespace": namespace}}
    body["spec"] = {"selector": {"matchLabels": labels}, "template": pod}
    made = kubectl.run("create", "--dry-run=server", "-o", "json", "-f", "-", document=json.dumps(body))
    return VARIABLE in json.loads(made)["spec"]["template"]["spec"]["containers"][0].get("env", [])


def _configuration(url: str, folder: Path, namespace: str) -> dict[str, Any]:
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments"]}
    rule["operations"] = ["CREATE", "UPDATE"]
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [
            {
                "name": "adds-env.example.com",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "reinvocationPolicy": "IfNeeded",
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "clientConfig": {"url": url, "caBundle": base64.b64encode((folder / "ca.crt").read_bytes()).decode()},
                "rules": [rule],
            }
        ],
    }
