"""The custom metrics of a cluster, from an adapter that runs beside it: what an autoscaler reads of pods.

The program is kube/custom-metrics. It answers for pods alone, with the one metric METRIC.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localcluster.binaries import require_tool
from localcluster.certificates import CertificateAuthority
from localcluster.kubectl import condition, wait_for
from localcluster.processes import spawn
from localcluster.settings import Layout
from localcluster.target import Target

METRIC = "modelserve_requests"
API_SERVICE = "v1beta2.custom.metrics.k8s.io"
_NAME = "custom-metrics"
_PORT = 6444


@contextmanager
def custom_metrics(target: Target, layout: Layout, *, namespace: str, folder: Path) -> Iterator[None]:
    """The API server of a local cluster answers custom.metrics.k8s.io/v1beta2 while the context lasts.

    `namespace`: of the Service that leads there; `folder`: for new certificates and the log. Raises ClusterError.
    """
    program = require_tool(_NAME, print)
    authority = CertificateAuthority.create(folder / "certificates")
    authority.issue_server("adapter", [f"{_NAME}.{namespace}.svc"])
    certificates, kubeconfig = authority.folder, target.kubectl.kubeconfig
    command = [
        str(program),
        f"--bind-address={layout.host_address}",
        f"--secure-port={_PORT}",
        f"--tls-cert-file={certificates}/adapter.crt",
        f"--tls-private-key-file={certificates}/adapter.key",
        *(f"--{kind}-kubeconfig={kubeconfig}" for kind in ("lister", "authentication", "authorization")),
    ]
    adapter = spawn(command, log=folder / f"{_NAME}.log")
    try:
        target.kubectl.apply(*_registration(layout, namespace, certificates / "ca.crt"))

        def available() -> bool:
            return condition(target.kubectl.get("apiservice", API_SERVICE), "Available").get("status") == "True"

        wait_for(f"APIService {API_SERVICE}", available)
        yield
    finally:
        # The API first: while one does not answer, no namespace ends and no garbage is collected.
        target.kubectl.delete("apiservice", API_SERVICE)
        target.kubectl.delete("service,endpointslice", _NAME, "-n", namespace)
        adapter.terminate(timeout_s=10)


def _registration(layout: Layout, namespace: str, authority: Path) -> tuple[dict[str, Any], ...]:
    """A Service that leads to this machine, and the API that it serves."""
    metadata = {"name": _NAME, "namespace": namespace}
    group, version = "custom.metrics.k8s.io", "v1beta2"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": _PORT}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": {"kubernetes.io/service-name": _NAME}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": _PORT}],
        "endpoints": [{"addresses": [layout.host_address]}],
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API_SERVICE},
        "spec": {
            "group": group,
            "version": version,
            "service": {"name": _NAME, "namespace": namespace, "port": 443},
            "caBundle": base64.b64encode(authority.read_bytes()).decode(),
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    return service, endpoints, api
