"""How a node differs from the plain local one: the devices it lends to its containers, and what its machine lacks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class NodeProfile:
    """`services`: Service addresses work, by kube-proxy and masquerading; both need iptables.

    `site` is a folder of Python packages that containers see before those of this program's environment. `programs` and
    `libraries` are folders of the node that containers search too. A container may use every node of `devices`. It sees
    `kernels` where the worker's image has those that were compiled ahead.
    """

    services: bool = True
    fixed_memory: bool = True  # False where a machine's memory grows as it is used: then no limit is derived from it
    site: Path | None = None
    programs: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    kernels: Path | None = None
    environment: tuple[str, ...] = ()  # NAME=value, for containers whose pod does not say otherwise


PLAIN = NodeProfile()


def linux_devices(default: dict[str, Any], devices: Iterable[Path]) -> dict[str, Any]:
    """The `linux` section of an OCI runtime specification with character devices that any user may read and write."""
    nodes = []
    rules = list(default["resources"]["devices"])
    for path in devices:
        status = path.stat()
        if not stat.S_ISCHR(status.st_mode):
            raise ValueError(f"{path} is not a character device; only those can be lent to containers")
        number = {"type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        nodes.append({"path": str(path), **number, "fileMode": 0o666, "uid": 0, "gid": 0})
        rules.append({"allow": True, "access": "rwm", **number})
    return default | {"devices": nodes, "resources": default["resources"] | {"devices": rules}}
