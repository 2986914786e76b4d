"""Where the node sends what comes to a Service: kube-proxy's rules follow the endpoints at a pace of their own."""

from __future__ import annotations

import re
import subprocess
import time

from localcluster import node_namespaces
from localcluster.convergence import ready_addresses
from localcluster.deployment import Deployed
from localcluster.kubectl import wait_for
from localcluster.record import Record
from localcluster.settings import ClusterError, Layout

_ELSEWHERE_S = 1.0  # given to the nodes of a cluster whose rules cannot be read from here


def wait_routed(served: Deployed) -> None:
    """Wait until new connections to the Service reach its ready endpoints and nobody else. Raises ClusterError."""
    layout, namespace = served.target.local, served.kubectl.namespace
    if layout is None:
        time.sleep(_ELSEWHERE_S)
        return
    assert namespace is not None
    wait_for(
        f"the node's rules for {served.name}",
        lambda: _addresses(layout, namespace, served.name) == ready_addresses(served),
    )


def _addresses(layout: Layout, namespace: str, service: str) -> set[str]:
    """Of the pods that the rules name for a Service."""
    record = Record.load(layout)
    if record is None:
        raise ClusterError(f"cluster {layout.name} does not run")
    command = [*node_namespaces.enter(record.processes["node"]), "iptables-save", "-t", "nat"]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf'"{re.escape(namespace)}/{re.escape(service)}(?::[\w-]+)? -> ([0-9.]+):\d+"', rules))
