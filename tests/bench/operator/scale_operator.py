"""The operator as a process of its own, and what it says and costs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.metrics_core import Sample
from prometheus_client.parser import text_string_to_metric_families

from localcluster.control_plane import ControlPlane
from localcluster.operator_process import process_environment
from localcluster.processes import Process, free_ports, spawn

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Operator:
    """The operator's process, and what it says of itself."""

    plane: ControlPlane
    process: Process
    port: int
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def start(
        cls, plane: ControlPlane, *, profile: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> Operator:
        """`settings`: MODELSERVE_ variables beside those for its metrics."""
        (port,) = free_ports(1)
        environment = process_environment(plane.operator_kubeconfig, port)
        environment |= {"PYTHONPATH": str(ROOT / "operator"), **(settings or {})}
        profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
        command = [sys.executable, *profiler, "-m", "modelserve_operator"]
        return cls(plane, spawn(command, log=plane.folder / "operator.log", environment=environment), port)

    def stop(self) -> None:
        self.process.terminate(timeout_s=60)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def memory_mib(self, name: str) -> float:
        """VmHWM (the most it ever had) or VmRSS (what it has now)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

    async def samples(self, name: str) -> list[Sample]:
        """Of one metric; none before the operator answers."""
        if not self.process.alive:
            raise RuntimeError((self.plane.folder / "operator.log").read_text()[-3000:])
        try:
            url = f"http://127.0.0.1:{self.port}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url, params={"name[]": name}) as got:
                text = await got.text()
        except aiohttp.ClientError:
            return []
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return [each for each in samples if each.name == name]

    async def reconciled(self) -> float:
        return sum(each.value for each in await self.samples("modelserve_operator_reconciles_total"))

    async def idle(self) -> bool:
        return not any(each.value for each in await self.samples("modelserve_operator_queue_depth"))

    async def buckets(self, name: str) -> Counter[float]:
        """Observations of a histogram at or below each bound, in seconds."""
        return Counter({float(each.labels["le"]): int(each.value) for each in await self.samples(f"{name}_bucket")})

    async def rests(self, *, at_least: float) -> float:
        """Wait until `at_least` reconciles are done and none waits; the second when that was first seen."""
        while await self.reconciled() < at_least or not await self.idle():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.25)
        return self.seconds


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
