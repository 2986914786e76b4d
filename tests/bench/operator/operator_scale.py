"""Times the operator with thousands of ModelServes and nodes.

    python tests/bench operator_scale

A real API server and etcd (tests/cluster), the real operator as a process, and objects in PreviewOnly, so that plans
are made and nothing runs. Measured, one after the other:

start      from the operator's start until every status has a plan
at rest    writes that the API server's audit log has from the operator, while kubelets post heartbeats
restart    until every ModelServe was looked at again; nothing is to be written
changes    from a changed spec to the status of its generation, at a fixed rate
overtaken  the same for single changes while a relabelling of all nodes has everything planned anew

Wall seconds depend on what else the machine does; CPU seconds of the operator and of the API server stand beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.operator import scale_fleet as fleet
from bench.operator.scale_operator import Operator, cpu_seconds
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.operator_process import permissions
from localcluster.settings import OPERATOR_USER

ROOT = Path(__file__).resolve().parents[3]
SERVES = f"/apis/serving.modelserve.dev/v1alpha1/namespaces/{fleet.NAMESPACE}/modelserves"
NODES = "/api/v1/nodes"
CLIENTS = 16  # requests of this program at a time
HEARTBEATS_PER_S = 7  # 2,000 nodes, each every five minutes
OWN_SECONDS = {
    "modelserve_operator_queue_seconds": "in the queue",
    "modelserve_operator_reconcile_seconds": "in a reconcile, its writes included",
}
MERGE = "application/merge-patch+json"
READS = ("get", "list", "watch")
STRATEGIC = "application/strategic-merge-patch+json"


class Api:
    """Requests as administrator."""

    def __init__(self, plane: ControlPlane, session: aiohttp.ClientSession) -> None:
        self._url, self._session = plane.url, session

    @classmethod
    @asynccontextmanager
    async def of(cls, plane: ControlPlane) -> AsyncIterator[Api]:
        connector = aiohttp.TCPConnector(ssl=plane.admin_tls(), limit=2 * CLIENTS)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            yield cls(plane, session)

    async def send(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._url + path, data=data, headers={"Content-Type": content}
        ) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
            return json.loads(text)

    async def each(self, calls: Iterable[tuple[str, str, Any, str]]) -> None:
        """Send many requests, CLIENTS at a time."""
        waiting = iter(calls)

        async def work() -> None:
            for method, path, body, content in waiting:
                await self.send(method, path, body, content=content)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(work())

    async def events(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Watch events of a collection from now on."""
        now = await self.send("GET", f"{path}?limit=1")
        version = now["metadata"]["resourceVersion"]
        query = f"?watch=true&resourceVersion={version}"
        async with self._session.get(self._url + path + query) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def writes(plane: ControlPlane) -> list[str]:
    """Every write of the operator so far, events included, but renewals of its Lease."""
    entries = map(json.loads, plane.audit_log.read_text().splitlines())
    return [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in entries
        if entry["user"]["username"] == OPERATOR_USER
        and entry["verb"] not in READS
        and entry.get("objectRef", {}).get("resource") != "leases"
    ]


class Measured:
    """Rows of the table: phase, figure, unit, limit."""

    def __init__(self, plane: ControlPlane) -> None:
        self.rows: list[dict[str, Any]] = [{"phase": "all", "what": "load of the machine", "value": os.getloadavg()[1]}]
        self._servers = [plane.processes[name] for name in ("kube-apiserver", "etcd")]

    def add(self, phase: str, what: str, value: float, limit: float | None = None) -> None:
        self.rows.append({"phase": phase, "what": what, "value": round(value, 3), "limit": limit})
        print(f"  {phase}: {what} {value:.3f}", file=sys.stderr, flush=True)

    @asynccontextmanager
    async def cpu(self, phase: str, operator: Operator) -> AsyncIterator[None]:
        """Adds the CPU seconds that pass in the operator and in the servers while the context lasts."""
        before = cpu_seconds(operator.process), sum(map(cpu_seconds, self._servers))
        yield
        self.add(phase, "operator, CPU s", cpu_seconds(operator.process) - before[0])
        self.add(phase, "API server and etcd, CPU s", sum(map(cpu_seconds, self._servers)) - before[1])

    def table(self) -> str:
        lines = [f"{'phase':11} {'figure':42} {'value':>10} {'limit':>8}"]
        for row in self.rows:
            limit = "" if row.get("limit") is None else f"{row['limit']:g}"
            lines.append(f"{row['phase']:11} {row['what']:42} {row['value']:10.2f} {limit:>8}")
        return "\n".join(lines)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def fill(api: Api, options: argparse.Namespace) -> None:
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": fleet.NAMESPACE}}
    await api.send("POST", "/api/v1/namespaces", space)
    plain = "application/json"
    await api.each(("POST", NODES, body, plain) for body in fleet.nodes(options.nodes))
    bodies = fleet.model_serves(options.model_serves, seed=options.seed)
    await api.each(("POST", SERVES, body, plain) for body in bodies)


async def first_start(api: Api, measured: Measured, operator: Operator, count: int) -> None:
    async with measured.cpu("start", operator):
        while not await operator.reconciled():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        measured.add("start", "first reconcile, s", operator.seconds)
        measured.add("start", "every status has a plan, s", await operator.rests(at_least=count), 60)
    await asyncio.sleep(2)  # the last ones, which no longer waited
    listed = await api.send("GET", SERVES)
    planned = sum("plan" in body["status"] for body in listed["items"])
    if planned != count:
        raise RuntimeError(f"{planned} of {count} have a plan")
    measured.add(
        "start", "bytes of a status, mean", statistics.mean(len(json.dumps(b["status"])) for b in listed["items"])
    )


async def at_rest(api: Api, measured: Measured, operator: Operator, options: argparse.Namespace) -> None:
    """Kubelets go on posting heartbeats meanwhile."""
    before, end, beat = len(writes(operator.plane)), time.monotonic() + options.rest_s, 0
    async with measured.cpu("at rest", operator):
        while time.monotonic() < end:
            beat += 1
            name = f"gpu-{beat % options.nodes:05d}"
            body = {"status": {"conditions": [fleet.heartbeat(beat)]}}
            await api.send("PATCH", f"{NODES}/{name}/status", body, content=STRATEGIC)
            await asyncio.sleep(1 / HEARTBEATS_PER_S)
    found = writes(operator.plane)[before:]
    print("\n".join(found[:5]), file=sys.stderr)
    measured.add("at rest", f"writes in {options.rest_s:.0f} s", len(found), 0)


async def restart(measured: Measured, operator: Operator, options: argparse.Namespace) -> Operator:
    before = len(writes(operator.plane))
    operator.stop()
    again = Operator.start(operator.plane, profile=options.profile)
    async with measured.cpu("restart", again):
        measured.add("restart", "all looked at again, s", await again.rests(at_least=options.model_serves), 30)
    await asyncio.sleep(5)
    measured.add("restart", "writes", len(writes(operator.plane)) - before, 0)
    measured.add("restart", "memory, highest (VmHWM), MiB", again.memory_mib("VmHWM"), 400)
    measured.add("restart", "memory now (VmRSS), MiB", again.memory_mib("VmRSS"))
    return again


class Answers:
    """Seconds from a change to the status of its generation, from a watch."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._sent: dict[tuple[str, int], float] = {}
        self._seen: dict[str, int] = {}
        self.seconds: list[float] = []

    async def watch(self) -> None:
        async for event in self._api.events(SERVES):
            now, body = time.monotonic(), event["object"]
            name, seen = body["metadata"]["name"], (body.get("status") or {}).get("observedGeneration") or 0
            self._seen[name] = seen
            for key in [each for each in self._sent if each[0] == name and each[1] <= seen]:
                self.seconds.append(now - self._sent.pop(key))

    async def change(self, name: str, body: Any) -> None:
        sent = time.monotonic()
        answer = await self._api.send("PATCH", f"{SERVES}/{name}", body, content=MERGE)
        generation = answer["metadata"]["generation"]
        if generation > (answer.get("status") or {}).get("observedGeneration", 0):
            if self._seen.get(name, 0) >= generation:  # the event was here before the answer
                self.seconds.append(time.monotonic() - sent)
            else:
                self._sent[name, generation] = sent

    async def complete(self) -> None:
        deadline = time.monotonic() + 600
        while self._sent:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no status for {len(self._sent)} changes, {list(self._sent)[:3]}")
            await asyncio.sleep(0.05)


@asynccontextmanager
async def answers(api: Api) -> AsyncIterator[Answers]:
    found = Answers(api)
    watching = asyncio.create_task(found.watch())
    await asyncio.sleep(0.5)
    try:
        yield found
    finally:
        watching.cancel()


async def changes(api: Api, measured: Measured, operator: Operator, options: argparse.Namespace, rate: float) -> None:
    rng, total, phase = random.Random(options.seed + rate), int(rate * options.change_s), f"{rate:g}/s"
    before = {name: await operator.buckets(name) for name in OWN_SECONDS}
    async with answers(api) as found, measured.cpu(phase, operator), asyncio.TaskGroup() as tasks:
        begin = time.monotonic()
        for number in range(total):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            name = f"serve-{rng.randrange(options.model_serves):05d}"
            tasks.create_task(found.change(name, fleet.edit(rng)))
        took = time.monotonic() - begin
        await found.complete()
    measured.add(phase, "changes a second", total / took)
    for share, limit in ((0.5, None), (0.9, None), (0.99, 500), (1.0, None)):
        measured.add(phase, f"to the plan, p{share * 100:.0f}, ms", quantile(found.seconds, share) * 1e3, limit)
    for name, what in OWN_SECONDS.items():
        counts = await operator.buckets(name)
        counts.subtract(before[name])
        bound = min(bound for bound, count in counts.items() if count >= 0.99 * max(counts.values()))
        measured.add(phase, f"of it {what}, p99 at most, ms", bound * 1e3)


async def overtaken(api: Api, measured: Measured, operator: Operator, options: argparse.Namespace) -> None:
    """All nodes get another memory label, which changes every plan; two changes a second go on meanwhile."""
    rng, before = random.Random(options.seed + 2), await operator.reconciled()
    listed = await api.send("GET", NODES)
    label = "nvidia.com/gpu.memory"
    relabelled = [
        (body["metadata"]["name"], str(int(body["metadata"]["labels"][label]) - 1024)) for body in listed["items"]
    ]
    bodies = (
        ("PATCH", f"{NODES}/{name}", {"metadata": {"labels": {label: memory}}}, MERGE) for name, memory in relabelled
    )
    async with answers(api) as found, measured.cpu("overtaken", operator):
        begin = time.monotonic()
        relabelling = asyncio.create_task(api.each(bodies))
        done = asyncio.create_task(operator.rests(at_least=before + options.model_serves))
        while not (relabelling.done() and done.done()) or time.monotonic() - begin < 5:
            name = f"serve-{rng.randrange(options.model_serves):05d}"
            await found.change(name, fleet.edit(rng))
            await asyncio.sleep(0.5)
        await relabelling
        measured.add("overtaken", "everything planned anew, s", time.monotonic() - begin)
        await found.complete()
    measured.add("overtaken", "changes of users meanwhile", len(found.seconds))
    measured.add("overtaken", "to the plan, median, ms", quantile(found.seconds, 0.5) * 1e3)
    measured.add("overtaken", "to the plan, longest, ms", max(found.seconds) * 1e3, 3000)


async def measure(measured: Measured, plane: ControlPlane, options: argparse.Namespace) -> None:
    plane.kubectl.apply(*permissions())
    async with Api.of(plane) as api:
        print(f"filling in {options.model_serves} ModelServes and {options.nodes} nodes", file=sys.stderr)
        await fill(api, options)
        operator = Operator.start(plane, profile=options.profile)
        try:
            await first_start(api, measured, operator, options.model_serves)
            measured.add("start", "memory, highest (VmHWM), MiB", operator.memory_mib("VmHWM"), 400)
            await asyncio.sleep(2)
            await at_rest(api, measured, operator, options)
            measured.add("at rest", "memory, highest (VmHWM), MiB", operator.memory_mib("VmHWM"), 400)
            operator = await restart(measured, operator, options)
            for rate in options.rates:
                await changes(api, measured, operator, options, rate)
            await overtaken(api, measured, operator, options)
            measured.add("overtaken", "memory, highest (VmHWM), MiB", operator.memory_mib("VmHWM"), 400)
            log = (plane.folder / "operator.log").read_text()
            measured.add("all", "tracebacks in the log", log.count("Traceback"), 0)
        finally:
            operator.stop()
            if options.keep_log:
                options.keep_log.write_text((plane.folder / "operator.log").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-serves", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--rest-s", type=float, default=300.0, help="seconds at rest")
    parser.add_argument("--rates", type=float, nargs="*", default=[20.0, 50.0], help="changes per second")
    parser.add_argument("--change-s", type=float, default=30.0, help="seconds of changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of a table")
    parser.add_argument("--keep-log", type=Path, help="copy the operator's log to this file")
    parser.add_argument("--profile", type=Path, help="run the operator under cProfile, of its last start")
    options = parser.parse_args()
    with control_plane() as plane:
        measured = Measured(plane)
        try:
            asyncio.run(measure(measured, plane, options))
        finally:
            print(json.dumps(measured.rows, indent=1) if options.json else measured.table())
