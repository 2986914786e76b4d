"""Start, inspect and end the local single-node cluster."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster import components, kernel_state, node_namespaces
from localcluster.binaries import Progress, cni_folder, require_packages, require_programs
from localcluster.images import plain_runtime_spec, runtime_spec, write_images, write_programs
from localcluster.node_profile import PLAIN, NodeProfile
from localcluster.processes import spawn
from localcluster.record import Record
from localcluster.settings import CLUSTERS, NODE_NAME, ClusterError, Layout, cache_dir


def obstacles() -> list[str]:
    """Why this machine cannot run the local cluster; empty when nothing is known to be in the way."""
    found = []
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        found.append(f"it needs Linux on x86-64, this is {platform.system()} on {platform.machine()}")
    elif os.geteuid() != 0:
        found.append("it needs root (namespaces, mounts, cgroups), this is an ordinary user")
    if shutil.which("unshare") is None:
        found.append("it needs the program unshare (package util-linux)")
    return found


def _lock_file() -> Path:
    return cache_dir() / "cluster.lock"


def _kernel_settings() -> Path:
    """Values of kernel settings before the first of the clusters that run now."""
    return cache_dir() / "kernel-settings.json"


@contextmanager
def _exclusive() -> Iterator[None]:
    """One `up` or `down` at a time, whatever the cluster: they share the build and kernel settings."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with _lock_file().open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(progress: Progress) -> None:
    """Install and build what is missing. Raises ClusterError."""
    with _exclusive():
        require_packages(progress, services=True)
        require_programs(progress)


def up(layout: Layout, progress: Progress, profile: NodeProfile = PLAIN) -> None:
    """Start the cluster, or return at once when it runs. Raises ClusterError with the cause and where the logs are."""
    if blocking := obstacles():
        raise ClusterError("the local cluster cannot run here: " + "; ".join(blocking))
    with _exclusive():
        record = Record.load(layout)
        if record is not None and record.healthy:
            return
        if record is not None or layout.path.exists():
            progress("removing what is left of an earlier cluster")
            _remove(layout)
        require_packages(progress, services=profile.services)
        programs = require_programs(progress)
        try:
            _start(layout, programs, progress, profile)
        except BaseException:
            progress(f"starting the cluster failed; its logs stay in {layout.logs} until the next start or removal")
            _stop(layout)
            raise


def down(layout: Layout) -> bool:
    """Remove the cluster and everything it made. False when there was none."""
    with _exclusive():
        if not layout.path.exists():
            return False
        _remove(layout)
    _lock_file().unlink(missing_ok=True)
    return True


def kill_and_restart(layout: Layout, name: str, *, down_s: float = 0.0) -> None:
    """SIGKILL one program of the running cluster and start it again after `down_s` seconds."""
    record = Record.load(layout)
    assert record is not None, "the cluster runs"
    entered = record.processes[name]  # nsenter, which waits for the program in the node's namespaces
    children = Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    entered.kill()
    time.sleep(down_s)
    programs = require_programs(lambda _: None)
    line = [*node_namespaces.enter(record.processes["node"]), *components.commands(layout, programs)[name]]
    record.with_process(name, spawn(line, log=layout.logs / f"{name}.log"))


def _start(layout: Layout, programs: dict[str, Path], progress: Progress, profile: NodeProfile) -> None:
    for folder in (layout.logs, layout.weights, layout.path / "pod-logs"):
        folder.mkdir(parents=True)
    layout.weights.chmod(0o755)
    progress("making certificates and configuration")
    components.write_certificates(layout)
    default = subprocess.run(["ctr", "oci", "spec"], capture_output=True, check=True).stdout
    plugins = cni_folder()
    assert plugins is not None, "require_packages checked it"
    write_programs(layout.path / "bin")
    snapshotter = _snapshotter(layout)
    components.write_configuration(
        layout,
        cni_folder=plugins,
        runtime_spec=runtime_spec(json.loads(default), programs=layout.path / "bin", profile=profile),
        plain_spec=plain_runtime_spec(json.loads(default), profile),
        snapshotter=snapshotter,
        profile=profile,
    )
    record = Record.new(layout)
    kernel_state.save_settings(_kernel_settings())
    kernel_state.create_cgroups(layout.cgroup)
    launcher, node = node_namespaces.create(
        programs["pause"], pod_logs=layout.path / "pod-logs", log=layout.logs / "node.log"
    )
    record = record.with_process("launcher", launcher).with_process("node", node)
    node_namespaces.connect(node, layout)
    lines = components.commands(layout, programs)
    inside = node_namespaces.enter(node)

    def start(*names: str) -> None:
        nonlocal record
        for name in names:
            record = record.with_process(name, spawn([*inside, *lines[name]], log=layout.logs / f"{name}.log"))

    kubectl = [str(programs["kubectl"]), f"--kubeconfig={layout.admin_kubeconfig}"]
    progress("starting containerd, etcd and the API server")
    start("containerd", "etcd", "kube-apiserver")
    _wait("the API server", lambda: _succeeds([*kubectl, "get", "--raw", "/readyz"]), record, layout)
    progress("starting the controller manager, the scheduler and the kubelet" + " and kube-proxy" * profile.services)
    ctr = [*inside, "ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io"]
    _wait("containerd", lambda: _succeeds([*ctr, "version"]), record, layout)
    for archive in write_images(layout.path / "images", pause=programs["pause"], profile=profile):
        _check([*ctr, "images", "import", f"--snapshotter={snapshotter}", str(archive)])
    start("kube-controller-manager", "kube-scheduler", "kubelet", *(["kube-proxy"] if profile.services else []))
    progress("waiting for the node")
    ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    _wait(
        "the node",
        lambda: _output([*kubectl, "get", "node", NODE_NAME, "-o", ready]) == "True",
        record,
        layout,
    )
    # Pods are refused until the controller manager has made this account.
    _wait(
        "the default service account",
        lambda: _succeeds([*kubectl, "get", "serviceaccount", "default", "-n", "default"]),
        record,
        layout,
    )


def import_image(layout: Layout, archive: Path) -> None:
    """Give the node of a running cluster an image, from a docker-archive. Raises ClusterError."""
    record = Record.load(layout)
    if record is None:
        raise ClusterError(f"cluster {layout.name} does not run")
    ctr = ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io"]
    inside = node_namespaces.enter(record.processes["node"])
    _check([*inside, *ctr, "images", "import", f"--snapshotter={_snapshotter(layout)}", str(archive)])


def _snapshotter(layout: Layout) -> str:
    """Layers are stacked by the kernel, but not on a file system that is stacked itself: there they are copied."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = max((m for m in mounts if layout.path.is_relative_to(m[0])), key=lambda mount: len(mount[0]))
    return "native" if found[1] == "overlay" else "overlayfs"


def _wait(what: str, ready: Callable[[], bool], record: Record, layout: Layout, *, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if dead := record.dead:
            log = layout.logs / f"{dead[0]}.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else ""
            raise ClusterError(f"{dead[0]} ended while {what} was starting; the end of {log}:\n{tail}")
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} was not ready within {timeout_s:.0f} s; logs are in {layout.logs}")
        time.sleep(0.2)


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command[-6:])} failed: {done.stderr.strip()}")


def _stop(layout: Layout) -> None:
    """End every process; mounts, interfaces and packet filter rules go with the namespaces."""
    record = Record.load(layout)
    if record is not None:
        if "node" in record.processes:
            record.processes["node"].kill()
        for process in record.processes.values():
            # Each of these waits for a process of the node: killed before that, it would leave a zombie to the host.
            if not process.ended_within(10):
                process.kill()
    node_namespaces.disconnect(layout)
    kernel_state.remove_cgroups(layout.cgroup)
    others = (Record.load(Layout(name)) for name in CLUSTERS if name != layout.name)
    if all(other is None for other in others):
        kernel_state.restore_settings(_kernel_settings())


def _remove(layout: Layout) -> None:
    _stop(layout)
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [path for path in mounted if Path(path).is_relative_to(layout.path)]
    if inside:
        raise ClusterError(f"not removing {layout.path}: {inside[0]} is a mount point; unmount it first")
    shutil.rmtree(layout.path)
