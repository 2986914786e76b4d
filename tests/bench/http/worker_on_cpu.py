"""A worker process on the CPU with the trained checkpoint of the tests, for programs that measure it from outside."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests/models/gemma4-tiny-ple"


class WorkerOnCpu:
    """Serves "tiny" on a free port, with 32 places and so many threads per product. `descriptors`: its limit of open
    files; `source`: of the code that it runs."""

    def __init__(self, *flags: str, descriptors: int | None = None, threads: int = 1, source: Path = ROOT) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process

        def limit() -> None:
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "modelserve_worker", "serve", "--model", str(MODEL), "--host", "127.0.0.1",
                "--served-model-name", "tiny", "--device", "cpu", "--port", str(self.port), "--max-model-len", "2048",
                "--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--cpu-memory-bytes", "3000000000", *flags,
            ],
            stderr=self._log, preexec_fn=limit,
            env=os.environ
            | {"PYTHONPATH": f"{source / 'operator'}:{source / 'worker'}", "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip

    def log_lines(self) -> int:
        self._log.seek(0)
        return sum(1 for _ in self._log)

    def resident_bytes(self) -> dict[str, int]:
        """Of the front end and of the engine."""
        pid = self.process.pid
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return {"front end": _resident_bytes(pid), "engine": max(map(_resident_bytes, children), default=0)}

    async def wait_until_ready(self, http: aiohttp.ClientSession) -> None:
        while True:
            assert self.process.poll() is None, "the worker ended"
            try:
                async with http.get(f"{self.url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
