"""The machine's GPUs as a Kubernetes node shows them: device nodes, driver folders, labels and an extended resource.

On a real cluster the device plugin, the container toolkit and GPU feature discovery do this. For tests only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localcluster.kubectl import Kubectl, wait_for
from localcluster.node_profile import NodeProfile
from localcluster.settings import NODE_NAME, ClusterError

DRIVER = Path("/usr/local/nvidia")
RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class Gpus:
    """Like GPUs of one machine; memory in MiB as the driver states it."""

    name: str
    count: int
    memory_mib: int
    compute_capability: str

    @classmethod
    def find(cls) -> Gpus:
        """Raises ClusterError when nvidia-smi finds none."""
        lines = query("name,memory.total,compute_cap").splitlines()
        if not lines:
            raise ClusterError("nvidia-smi lists no GPU")
        name, memory, capability = (field.strip() for field in lines[0].split(","))
        return cls(name, len(lines), int(memory), capability)

    def labels(self) -> dict[str, str]:
        """What GPU feature discovery would put on the node."""
        major, _, minor = self.compute_capability.partition(".")
        return {
            "nvidia.com/gpu.product": self.name.replace(" ", "-"),
            "nvidia.com/gpu.memory": str(self.memory_mib),
            "nvidia.com/gpu.count": str(self.count),
            "nvidia.com/gpu.compute.major": major,
            "nvidia.com/gpu.compute.minor": minor,
        }


def query(fields: str) -> str:
    """Answer of nvidia-smi, a line per GPU, without header and units. Raises ClusterError."""
    program = shutil.which("nvidia-smi", path=f"{os.environ['PATH']}:{DRIVER}/bin")
    if program is None:
        raise ClusterError("nvidia-smi is not on PATH: this machine has no NVIDIA driver")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def profile(*, site: Path | None, kernels: Path) -> NodeProfile:
    """A node without iptables whose containers see the driver, compiled `kernels`, and may use every GPU."""
    if not Path("/dev/nvidia-uvm").exists():  # the driver makes it when CUDA first runs
        subprocess.run([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"], check=True)
    named = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    libraries = dict.fromkeys(folder for folder in (*named, DRIVER / "lib64", DRIVER / "lib") if folder.is_dir())
    return NodeProfile(
        services=False,
        fixed_memory=False,
        site=site,
        programs=(DRIVER / "bin",),
        libraries=tuple(libraries),
        devices=tuple(sorted(path for path in Path("/dev").glob("nvidia*") if path.is_char_device())),
        kernels=kernels,
    )


def advertise(kubectl: Kubectl, gpus: Gpus) -> None:
    """Label the node and give it `nvidia.com/gpu`, then wait until pods may be scheduled on it."""
    kubectl.run("label", "node", NODE_NAME, "--overwrite", *(f"{key}={value}" for key, value in gpus.labels().items()))
    path = f"/status/capacity/{RESOURCE.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": path, "value": str(gpus.count)}])
    kubectl.run("patch", "node", NODE_NAME, "--subresource=status", "--type=json", "-p", patch)

    def allocatable() -> bool:
        return RESOURCE in kubectl.get("node", NODE_NAME)["status"]["allocatable"]

    wait_for(f"{RESOURCE} allocatable on the node", allocatable, timeout_s=60)
