"""Times what the operator says where a mixed fleet loses one GPU type.

    python tests/bench lost_accelerator

A real API server and etcd, the real operator as a process, 2,000 nodes of 12 products and 500 ModelServes whose plans
are committed. Then every node of the product that most of them are planned on is deleted, while users change other
ModelServes at a fixed rate. Measured: from the last node's deletion until every ModelServe that is concerned says
PoolsGone or proposes another plan, and from each user's change to the status of its generation meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from typing import Any

from bench.operator import scale_fleet as fleet
from bench.operator.operator_scale import NODES, SERVES, Answers, Api, answers, quantile
from bench.operator.scale_operator import Operator, cpu_seconds
from localcluster.control_plane import control_plane
from localcluster.operator_process import permissions

LIMIT_S = 10.0


def _told(body: dict[str, Any]) -> bool:
    status = body.get("status") or {}
    gone = any(each["type"] == "PoolsGone" and each["status"] == "True" for each in status.get("conditions") or ())
    return gone or "proposedPlan" in status


def _on(body: dict[str, Any]) -> str:
    return str(((body.get("status") or {}).get("plan") or {}).get("accelerator"))


async def fill(api: Api, options: argparse.Namespace) -> None:
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": fleet.NAMESPACE}}
    await api.send("POST", "/api/v1/namespaces", space)
    plain = "application/json"
    await api.each(("POST", NODES, body, plain) for body in fleet.nodes(options.nodes))
    serves = list(fleet.model_serves(options.model_serves, seed=options.seed))
    for body in serves:
        del body["spec"]["plan"]  # Automatic: plans are committed
    await api.each(("POST", SERVES, body, plain) for body in serves)


async def users(names: list[str], found: Answers, stop: asyncio.Event, rate: float) -> None:
    """Changes at a fixed rate, each of another object."""
    rng = random.Random(7)
    for name in rng.sample(names, len(names)):
        if stop.is_set():
            break
        await found.change(name, fleet.edit(rng))
        await asyncio.sleep(1 / rate)
    await found.complete()


async def measure(options: argparse.Namespace) -> bool:
    with control_plane() as plane:
        plane.kubectl.apply(*permissions())
        async with Api.of(plane) as api:
            await fill(api, options)
            operator = Operator.start(plane)
            try:
                return await lose(api, operator, options)
            finally:
                operator.stop()


async def lose(api: Api, operator: Operator, options: argparse.Namespace) -> bool:
    await operator.rests(at_least=options.model_serves)
    await asyncio.sleep(3)
    before = {body["metadata"]["name"]: body for body in (await api.send("GET", SERVES))["items"]}
    if not all(body["status"].get("revision") for body in before.values()):
        raise RuntimeError("not every plan is committed")
    product, count = Counter(map(_on, before.values())).most_common(1)[0]
    concerned = {name for name, body in before.items() if _on(body) == product}
    others = sorted(set(before) - concerned)
    lost = [
        body["metadata"]["name"]
        for body in fleet.nodes(options.nodes)
        if body["metadata"]["labels"]["nvidia.com/gpu.product"] == product
    ]
    told: dict[str, float] = {}
    revisions: dict[str, str] = {}

    async def hear() -> None:
        async for event in api.events(SERVES):
            body = event["object"]
            name = body["metadata"]["name"]
            revisions[name] = body["status"].get("revision", "")
            if name in concerned and name not in told and _told(body):
                told[name] = time.monotonic()

    stop = asyncio.Event()
    hearing = asyncio.create_task(hear())
    await asyncio.sleep(2)
    async with answers(api) as found:
        changing = asyncio.create_task(users(others, found, stop, options.rate))
        servers = [operator.plane.processes[name] for name in ("kube-apiserver", "etcd")]
        spent = cpu_seconds(operator.process), sum(map(cpu_seconds, servers))
        began = time.monotonic()
        await api.each(("DELETE", f"{NODES}/{name}", None, "application/json") for name in lost)
        gone = time.monotonic()
        while len(told) < len(concerned) and time.monotonic() - gone < 120:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        spent = cpu_seconds(operator.process) - spent[0], sum(map(cpu_seconds, servers)) - spent[1]
        stop.set()
        await changing
    hearing.cancel()
    moved = sum(revisions.get(name, "") not in ("", before[name]["status"]["revision"]) for name in concerned)
    last = max(told.values(), default=gone) - gone
    rows = [
        ("load of the machine", os.getloadavg()[0], None),
        (f"nodes of {product} that go, of {options.nodes}", len(lost), None),
        ("seconds that their deletion takes", gone - began, None),
        (f"ModelServes concerned, of {options.model_serves}", count, None),
        ("of them say PoolsGone or propose", len(told), count),
        ("s from the last deletion until all do", max(0.0, last), LIMIT_S),
        ("CPU s of the operator meanwhile", spent[0], None),
        ("CPU s of API server and etcd meanwhile", spent[1], None),
        ("of them re-planned by themselves", moved, 0),
        ("users' changes meanwhile", len(found.seconds), None),
        ("s to their answer, median", quantile(found.seconds, 0.5), None),
        ("s to their answer, p99", quantile(found.seconds, 0.99), None),
    ]
    for what, value, limit in rows:
        print(f"{what:48} {value:10.2f} {'' if limit is None else limit:>8}")
    return len(told) == count and last <= LIMIT_S and not moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--model-serves", type=int, default=500)
    parser.add_argument("--rate", type=float, default=5.0, help="users' changes a second")
    parser.add_argument("--seed", type=int, default=1)
    return 0 if asyncio.run(measure(parser.parse_args())) else 1
