"""The Linux namespaces that the node lives in, and the cable from the host to them.

All processes of the cluster share one PID, one mount and one network namespace. Ending the first process of the PID
namespace ends them all, and with them go their mounts, interfaces, routes and packet filter rules: the kernel does the
tidying, after a crash too.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from localcluster.processes import Process, spawn
from localcluster.settings import ClusterError, Layout

# Run inside the new namespaces. /run (sockets, network namespaces, runc), /var/log (pod logs) and /var/lib/cni (where
# containerd caches CNI results) become private; the rest of /var/lib stays visible, since a checkout may lie there.
# Shared propagation lets containers see what the kubelet mounts.
_SETUP = """set -eu
logs=$1 first=$2
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/host-var-lib
mount --bind "$logs" /var/log
mount --rbind /var/lib /run/host-var-lib
mount -t tmpfs -o mode=755 tmpfs /var/lib
for folder in /run/host-var-lib/*/; do
  name=$(basename "$folder")
  test "$name" = cni && continue
  mkdir "/var/lib/$name"
  mount --rbind "$folder" "/var/lib/$name"
done
exec "$first"
"""


def create(pause: Path, *, pod_logs: Path, log: Path) -> tuple[Process, Process]:
    """Start the node's first process in namespaces of its own; return the launcher, which ends after all, and it."""
    command = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    launcher = spawn([*command, "sh", "-c", _SETUP, "sh", str(pod_logs), str(pause)], log=log)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and launcher.alive:
        with suppress(OSError, IndexError):  # not there yet, or it has just failed and its log says why
            first = int(children.read_text().split()[0])
            if Path(f"/proc/{first}/exe").readlink().name == pause.name:
                return launcher, Process.of(first)
        time.sleep(0.02)
    launcher.kill()
    reason = log.read_text(errors="replace").strip() or "timed out"
    raise ClusterError(f"the node's namespaces could not be made (CAP_SYS_ADMIN is needed): {reason}")


def enter(node: Process) -> list[str]:
    """The command prefix that runs a program inside the node."""
    return ["nsenter", f"--target={node.pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--"]


def connect(node: Process, layout: Layout) -> None:
    """Lay a veth cable from the host to the node, with routes to pods and Services. It goes when the node goes."""
    inside = enter(node)
    interface = layout.host_interface
    commands = [
        ["ip", "link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)],
        ["ip", "address", "add", f"{layout.host_address}/30", "dev", interface],
        ["ip", "link", "set", interface, "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "ip", "address", "add", f"{layout.node_address}/30", "dev", "eth0"],
        [*inside, "ip", "link", "set", "eth0", "up"],
        [*inside, "ip", "route", "add", "default", "via", layout.host_address],
        *(
            ["ip", "route", "add", network, "via", layout.node_address]
            for network in (layout.pod_range, layout.service_range)
        ),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def disconnect(layout: Layout) -> None:
    """Remove the host's end of the cable where it is still there: the kernel removes it some time after the node."""
    if Path(f"/sys/class/net/{layout.host_interface}").exists() and shutil.which("ip"):
        subprocess.run(["ip", "link", "delete", layout.host_interface], capture_output=True, check=False)
