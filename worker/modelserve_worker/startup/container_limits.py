"""Reads how many cores and how much memory the container of this process may use. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

from modelserve.errors import InvalidInput

MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP = Path("/sys/fs/cgroup")


def memory_limit_bytes(*, paths: tuple[Path, ...] = MEMORY_LIMITS) -> int | None:
    """Bytes that the container may use; None where that is as many as the machine has."""
    machine = meminfo_bytes("MemTotal")
    for path in paths:
        text = path.read_text().strip() if path.exists() else "max"
        if text != "max" and int(text) < machine:  # cgroup v1 says "no limit" with a huge number
            return int(text)
    return None


def meminfo_bytes(name: str) -> int:
    """A line of /proc/meminfo, such as MemTotal or MemAvailable. Raises InvalidInput where it is not there."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise InvalidInput(f"/proc/meminfo lacks {name}; set cpuMemoryBytes", field="cpuMemoryBytes")


def cores(*, cgroup: Path = _CGROUP) -> float:
    """Cores that this process may use at a time: those it may run on, and no more than the container's CPU limit."""
    allowed = float(len(os.sched_getaffinity(0)))
    unified, old = cgroup / "cpu.max", cgroup / "cpu"
    if unified.exists():
        quota, period = unified.read_text().split()
    elif (old / "cpu.cfs_quota_us").exists():
        quota, period = ((old / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return allowed
    return allowed if quota in ("max", "-1") else min(allowed, int(quota) / int(period))
