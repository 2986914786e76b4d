"""The processes behind a worker pod of the local cluster, to be signalled from outside of its container."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster.settings import ClusterError


@dataclass(frozen=True)
class WorkerProcesses:
    """Process numbers on this machine: the front end, which is the container's first process, and its engine."""

    front_end: int
    engine: int


def worker_processes(pod: dict[str, Any]) -> WorkerProcesses:
    """Raises ClusterError when the pod has no serving worker on this machine."""
    uid = pod["metadata"]["uid"]
    found: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if uid not in (folder / "cgroup").read_text():
                continue
            command = (folder / "cmdline").read_text().split("\0")
        except OSError:  # it has just ended
            continue
        if "serve" in command and any(word.endswith("modelserve-worker") for word in command):
            found["front_end"] = int(folder.name)
        elif any("spawn_main" in word for word in command):
            found["engine"] = int(folder.name)
    if len(found) != 2:
        raise ClusterError(f"pod {pod['metadata']['name']} has no serving worker here, only {sorted(found)}")
    return WorkerProcesses(**found)
