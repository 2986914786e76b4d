"""The build of images and tools as a background process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from localcluster.settings import REPOSITORY, ClusterError, cache_dir


def start() -> subprocess.Popen[bytes]:
    """Start `cluster.py images` below the tests that wait for it, above others; its output goes into a file."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    program = str(REPOSITORY / "tests" / "cluster" / "cluster.py")
    # buildah's mounts stay its own: another test looks for mounts that a cluster left.
    command = ["unshare", "--mount", "nice", "-n", "5", sys.executable, program, "images"]
    with (cache_dir() / "images.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)


def stop(job: subprocess.Popen[bytes]) -> None:
    """End it, with every program that it runs, unless it has ended."""
    if job.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def wait(job: subprocess.Popen[bytes], *, timeout_s: float = 1200.0) -> None:
    """Wait for its end. Raises ClusterError with the end of its output when it failed."""
    try:
        status = job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        stop(job)
        status = -1
    if status:
        end = (cache_dir() / "images.log").read_text(errors="replace")[-2000:]
        raise ClusterError(f"building the images ended with {status}:\n{end}")
