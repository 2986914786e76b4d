"""Where this machine reaches a Service: directly on the local cluster, through a port-forward on any other."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from localcluster.kubectl import wait_for
from localcluster.settings import ClusterError
from localcluster.target import Target


@contextmanager
def service_url(target: Target, namespace: str, service: str) -> Iterator[str]:
    """The base address `http://HOST[:PORT]` of a Service's port 80 while the context lasts."""
    kubectl = target.kubectl
    if target.local is not None:
        address = kubectl.get("service", service, "-n", namespace)["spec"]["clusterIP"]
        # The node's rules follow the endpoints, which make a ModelServe Ready, at a pace of their own.
        wait_for(f"{service} behind {address}", lambda: _connects(address, 80))
        yield f"http://{address}"
        return
    command = [
        str(kubectl.program),
        f"--kubeconfig={kubectl.kubeconfig}",
        f"--namespace={namespace}",
        "port-forward",
        f"service/{service}",
        ":80",
    ]
    forward = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert forward.stdout is not None
        assert forward.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", forward.stdout.readline())
        if found is None:
            forward.terminate()
            raise ClusterError(f"kubectl port-forward service/{service} failed: {forward.stderr.read().strip()}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        forward.terminate()
        forward.communicate()


def _connects(host: str, port: int) -> bool:
    """Whether a new connection opens. One that began before the node's rules were there keeps going astray."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True
