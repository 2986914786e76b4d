"""The Linux namespaces that the node lives in, and the cable from the host to them.

All processes of the cluster share one PID, one mount and one network namespace. Ending the first process of the PID
namespace ends them all, and with them go their mounts, interfaces, routes and packet filter rules: the kernel does the
tidying, after a crash too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from localcluster.settings import (
    HOST_ADDRESS,
    HOST_INTERFACE,
    LINK_PREFIX,
    NODE_ADDRESS,
    POD_RANGE,
    SERVICE_RANGE,
    ClusterError,
)

# Run inside the new namespaces. /run (sockets, network namespaces, runc), /var/log (pod logs) and the folder where
# containerd caches CNI results become private. Shared propagation lets containers see what the kubelet mounts.
_SETUP = """set -eu
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns
mount -t tmpfs tmpfs "$3"
mount --bind "$1" /var/log
exec "$2"
"""


CNI_CACHE = Path("/var/lib/cni")  # containerd offers no setting for it


@dataclass(frozen=True)
class Process:
    """A process that outlives this program. The start time tells it from a later one with the same number."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_ticks(pid) or 0)

    @property
    def alive(self) -> bool:
        return self.start_ticks != 0 and _start_ticks(self.pid) == self.start_ticks

    def terminate(self, *, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when it still runs after `timeout_s`."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
        if not self._gone_within(timeout_s):
            self.kill()

    def kill(self, *, timeout_s: float = 20.0) -> None:
        """SIGKILL, then wait until it is gone. Raises ClusterError when it stays."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        if not self._gone_within(timeout_s):
            raise ClusterError(f"process {self.pid} did not end within {timeout_s:.0f} s of SIGKILL")

    def _gone_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def create(*, pause: Path, logs: Path) -> Process:
    """Start the node's first process in namespaces of its own and return it, as the host numbers it."""
    command = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    launcher = subprocess.Popen(
        [*command, "sh", "-c", _SETUP, "sh", str(logs), str(pause), str(CNI_CACHE)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and launcher.poll() is None:
        listed = children.read_text().split()
        if listed and Path(f"/proc/{listed[0]}/exe").readlink().name == pause.name:
            return Process.of(int(listed[0]))
        time.sleep(0.02)
    launcher.kill()
    reason = launcher.stderr.read().decode().strip() if launcher.stderr else ""
    raise ClusterError(f"the node's namespaces could not be made (CAP_SYS_ADMIN is needed): {reason or 'timed out'}")


def enter(node: Process) -> list[str]:
    """The command prefix that runs a program inside the node."""
    return ["nsenter", f"--target={node.pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--"]


def connect(node: Process) -> None:
    """Lay a veth cable from the host to the node, with routes to pods and Services. It goes when the node goes."""
    inside = enter(node)
    commands = [
        ["ip", "link", "add", HOST_INTERFACE, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)],
        ["ip", "address", "add", f"{HOST_ADDRESS}/{LINK_PREFIX}", "dev", HOST_INTERFACE],
        ["ip", "link", "set", HOST_INTERFACE, "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "ip", "address", "add", f"{NODE_ADDRESS}/{LINK_PREFIX}", "dev", "eth0"],
        [*inside, "ip", "link", "set", "eth0", "up"],
        [*inside, "ip", "route", "add", "default", "via", HOST_ADDRESS],
        *(["ip", "route", "add", network, "via", NODE_ADDRESS] for network in (POD_RANGE, SERVICE_RANGE)),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def disconnect() -> None:
    """Remove the host's end of the cable where it is still there: the kernel removes it some time after the node."""
    if Path(f"/sys/class/net/{HOST_INTERFACE}").exists() and shutil.which("ip"):
        subprocess.run(["ip", "link", "delete", HOST_INTERFACE], capture_output=True, check=False)
