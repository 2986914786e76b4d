"""What the kubelet changes in the kernel outside any namespace: the cgroups of pods, and a few global settings."""

from __future__ import annotations

import json
import time
from pathlib import Path

from localcluster.settings import ClusterError

_CGROUPS = Path("/sys/fs/cgroup")
_SETTINGS = (  # the kubelet sets these on start-up, in pkg/kubelet/cm
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def save_settings(file: Path) -> None:
    """Write the present values to `file`, unless an earlier cluster's start has written it and changed them since."""
    if not file.exists():
        paths = {name: Path("/proc/sys") / name for name in _SETTINGS}
        file.write_text(json.dumps({name: path.read_text().strip() for name, path in paths.items() if path.exists()}))


def restore_settings(file: Path) -> None:
    """Set what save_settings found, and remove `file`."""
    if file.exists():
        for name, value in json.loads(file.read_text()).items():
            path = Path("/proc/sys") / name
            if path.read_text().strip() != value:
                path.write_text(value)
        file.unlink()


def cgroup_folders(name: str) -> list[Path]:
    """The cluster's cgroup in the unified hierarchy (cgroup v2), or in each controller's (v1)."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS / name]
    hierarchies = (folder for folder in _CGROUPS.iterdir() if folder.is_dir() and not folder.is_symlink())
    return [folder / name for folder in hierarchies if (folder / "cgroup.procs").exists()]


def create_cgroups(name: str) -> None:
    """Make the cgroup below which the kubelet keeps all pods. Raises ClusterError when the kernel refuses."""
    try:
        if (_CGROUPS / "cgroup.controllers").exists():
            wanted = [f"+{controller}" for controller in ("cpuset", "cpu", "memory", "pids", "hugetlb")]
            offered = {f"+{controller}" for controller in (_CGROUPS / "cgroup.controllers").read_text().split()}
            (_CGROUPS / "cgroup.subtree_control").write_text(" ".join(c for c in wanted if c in offered))
        for folder in cgroup_folders(name):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"cannot make the cgroup {name!r} below {_CGROUPS} ({error.strerror}): it must be mounted writable, and "
            "in cgroup v2 the root must hold no processes of its own"
        ) from error


def remove_cgroups(name: str, *, timeout_s: float = 20.0) -> None:
    """Remove the cluster's cgroups, children first. The kernel needs a moment after the last process has ended."""
    deadline = time.monotonic() + timeout_s
    for root in cgroup_folders(name):
        while root.exists():
            try:
                for folder in sorted(root.rglob("*/"), key=lambda path: len(path.parts), reverse=True):
                    folder.rmdir()
                root.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"cgroup {error.filename} is still in use: {error.strerror}") from error
                time.sleep(0.05)
