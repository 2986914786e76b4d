"""The build of images and tools as a background process of its own."""

from __future__ import annotations

import subprocess
import sys

from localcluster.settings import REPOSITORY, ClusterError, cache_dir


def start() -> subprocess.Popen[bytes]:
    """Start `cluster.py images` at the lowest priority; its output goes into a file."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    program = str(REPOSITORY / "tests" / "cluster" / "cluster.py")
    # buildah's mounts stay its own: another test looks for mounts that a cluster left.
    command = ["unshare", "--mount", "nice", "-n", "19", sys.executable, program, "images"]
    with (cache_dir() / "images.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def wait(job: subprocess.Popen[bytes], *, timeout_s: float = 1200.0) -> None:
    """Wait for its end. Raises ClusterError with the end of its output when it failed."""
    try:
        status = job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        job.kill()
        status = -1
    if status:
        end = (cache_dir() / "images.log").read_text(errors="replace")[-2000:]
        raise ClusterError(f"building the images ended with {status}:\n{end}")
