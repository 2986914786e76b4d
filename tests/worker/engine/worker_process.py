"""A worker as a process of its own, a stub for its engine, and what a test does with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from localcluster.processes import free_ports

TESTS = Path(__file__).resolve().parents[2]
MODEL = TESTS / "models/gemma4-tiny-ple"
STUB_WORKER = TESTS / "worker/server/stub_worker.py"


class Worker:
    """A running worker: its process, its client and its termination message."""

    def __init__(self, process: subprocess.Popen[str], http: httpx.Client, termination: Path) -> None:
        self.process = process
        self.http = http
        self.termination = termination

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            try:
                if self.http.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)

    def engine(self) -> dict[str, int]:
        report: dict[str, int] = self.http.get("/v1/plan").json()
        return report

    def imported(self) -> str:
        """What the front end said at its end about heavy modules."""
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()[-1]


@contextmanager
def serving(tmp_path: Path, *flags: str, **settings: Any) -> Iterator[Worker]:
    """A worker over a StubEngine of `settings`; it drains for 20 s unless `flags` say otherwise."""
    termination = tmp_path / "termination-log"
    termination.touch()
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            sys.executable, str(STUB_WORKER), json.dumps(settings), str(termination),
            "serve", "--model", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--drain-seconds", "20", *flags,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield Worker(process, http, termination)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
