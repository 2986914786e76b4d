"""The local cluster itself: it starts, restarts after a crash, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from localcluster import lifecycle
from localcluster.binaries import require_programs
from localcluster.kubectl import Kubectl, wait_for
from localcluster.record import Record
from localcluster.settings import NODE_NAME, ClusterError, Layout

SCRATCH = Layout("scratch")
PROGRAMS = re.compile(r"(kube|etcd|containerd|pause|unshare|nsenter|runc)")
FOLDERS = re.compile(r"(kube|etcd|containerd|cni|pods|log/containers|runc|modelserve)")  # packages bring others


def _snapshot() -> dict[str, set[str]]:
    """What a cluster could leave on this machine, where other tests run beside it: API servers of their own, too."""

    def output(*command: str) -> set[str]:
        if shutil.which(command[0]) is None:
            return set()
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    cgroups = Path("/sys/fs/cgroup")
    kernel = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
    processes, own = set(), Path("/proc/self/ns/pid").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
            line = (folder / "cmdline").read_bytes()
            of_cluster = (folder / "ns/pid").readlink() != own or bytes(SCRATCH.path) in line
        except OSError:
            continue
        if of_cluster and PROGRAMS.search(name):
            processes.add(f"{folder.name} {name}")
    return {
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "interfaces": {path.name for path in Path("/sys/class/net").iterdir()},
        "routes": output("ip", "route"),
        "packet filter": {line for line in output("iptables-save") if not line.startswith(("#", ":"))},
        "cgroups": {str(path) for path in [*cgroups.glob("*/"), *cgroups.glob("*/*/")] if "modelserve" in path.name},
        "processes": processes,
        "network namespaces": {path.name for path in Path("/run/netns").glob("*")},
        "folders": {
            str(path)
            for parent in ("/var/lib", "/var/log", "/run", "/opt")
            for path in Path(parent).iterdir()
            if FOLDERS.search(str(path))
        },
        "kernel settings": {f"{path} {path.read_text().strip()}" for path in kernel},
    }


@pytest.fixture
def scratch() -> Iterator[Layout]:
    if obstacles := lifecycle.obstacles():
        pytest.skip("the local cluster cannot run here: " + "; ".join(obstacles))
    lifecycle.down(SCRATCH)
    yield SCRATCH
    lifecycle.down(SCRATCH)


def _up(layout: Layout) -> Kubectl:
    lines: list[str] = []
    lifecycle.up(layout, lines.append)
    assert lines, "a cluster that has to start says so"
    kubectl = shutil.which("kubectl") or str(require_programs(print)["kubectl"])
    return Kubectl(Path(kubectl), layout.admin_kubeconfig)


def _run_pod(kubectl: Kubectl) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sleeper", "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "sleeper",
                    "image": "modelserve-worker:local",
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "600"],
                    "ports": [{"containerPort": 8000, "hostPort": 18000}],
                }
            ],
        },
    }
    kubectl.apply(pod)
    wait_for("pod running", lambda: kubectl.get("pod", "sleeper")["status"]["phase"] == "Running")


def test_up_is_idempotent_and_recovers_from_a_crash_and_a_removed_cluster_leaves_nothing(scratch: Layout) -> None:
    """With a running pod, a host port and a mounted token volume: everything a node sets up on its host."""
    before = _snapshot()
    _up(scratch)
    again: list[str] = []
    lifecycle.up(scratch, again.append)
    assert again == []
    record = Record.load(scratch)
    assert record is not None
    os.kill(record.processes["etcd"].pid, signal.SIGKILL)
    os.kill(record.processes["node"].pid, signal.SIGKILL)
    wait_for("etcd ends", lambda: "etcd" in record.dead)
    kubectl = _up(scratch)
    assert [node["metadata"]["name"] for node in kubectl.items("nodes")] == [NODE_NAME]
    _run_pod(kubectl)
    assert scratch.host_interface in _snapshot()["interfaces"], "the snapshot sees a running cluster"
    assert lifecycle.down(scratch)
    assert not scratch.path.exists()
    with suppress(ClusterError):  # what is left says more
        wait_for("nothing left", lambda: _left(before) == {})
    assert _left(before) == {}


def _left(before: dict[str, set[str]]) -> dict[str, set[str]]:
    after = _snapshot()
    return {what: after[what] - before[what] for what in after if after[what] - before[what]}


def test_an_unknown_cluster_name_is_refused() -> None:
    with pytest.raises(ClusterError, match="no local cluster 'prod'; choose one of demo, test, scratch"):
        Layout("prod")
