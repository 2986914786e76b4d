"""The worker as a process, on the CPU, with room for adapters."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from adapter_server import KEY

from localcluster.processes import free_ports

BASE = "tiny"  # name of the model itself


def write_keys(told: Path) -> None:
    """The directory of the set, with the operator's key."""
    told.mkdir()
    (told / "management-keys").write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")


@contextmanager
def adapter_worker(model: Path, told: Path) -> Iterator[str]:
    """The base address of a worker that is ready; it has room for four adapters of rank 8, three at a time."""
    (port,) = free_ports(1)
    settings = {
        "model": model, "served-model-name": BASE, "device": "cpu", "host": "127.0.0.1", "port": port,
        "max-model-len": 512, "max-num-seqs": 24, "cpu-memory-bytes": 3_000_000_000, "max-loras": 3,
        "max-cpu-loras": 4, "max-lora-rank": 8,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "modelserve_worker", "serve", *flags]
    environment = os.environ | {"MODELSERVE_ADAPTERS_DIR": str(told)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield url
        finally:
            process.kill()
