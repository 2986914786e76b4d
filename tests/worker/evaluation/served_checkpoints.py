"""Workers of their own for the harness: a checkpoint on the CPU, over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from localcluster.processes import free_ports


@contextmanager
def served_checkpoints(folder: Path, models: Mapping[str, Path], **settings: Any) -> Iterator[dict[str, str]]:
    """Base URLs by served name; all are started beside each other and ready."""
    ports = dict(zip(models, free_ports(len(models)), strict=True))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, model in models.items():
            fields = {
                "model": str(model), "servedModelName": name, "device": "cpu", "host": "127.0.0.1",
                "port": ports[name], "cpuMemoryBytes": 3_000_000_000, **settings,
            }  # fmt: skip
            (folder / f"{name}.yaml").write_text(json.dumps(fields))  # JSON is YAML
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "modelserve_worker", "serve", "--config", str(folder / f"{name}.yaml")],
                    stderr=log,
                )  # fmt: skip
        for name, process in processes.items():
            while not _ready(ports[name]):
                assert process.poll() is None, (folder / f"{name}.log").read_text()
                time.sleep(0.1)
        yield {name: f"http://127.0.0.1:{port}/v1" for name, port in ports.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False
