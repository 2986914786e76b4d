"""Moves a fleet to a newer worker while the operator is killed again and again, drains a node, and tries a bad image.

    python tests/bench operator_fleet

A real API server, etcd, scheduler and controllers of Deployments, ReplicaSets and endpoints (tests/cluster), the real
operator as a process, and nodes whose kubelet is a task of this program: a pod with the image that fails cannot pull
it, any other is Ready a second after it got a node. Every event of a pod is looked at: at no moment may a ModelServe
have fewer ready workers than it wants, or more ModelServes than the budget be on their way. Exit 1 says that one was.
The drain is kubectl's, of a node with the only worker of each of eight ModelServes with `onEviction: SurgeFirst`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

from bench.operator.operator_scale import MERGE, Api
from bench.operator.played_kubelets import (
    Kubelets,
    add_node,
    controllers,
    image,
    is_ready,
    model_serve,
    owner,
    serves_of,
    until,
)
from bench.operator.scale_operator import Operator
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.operator_process import permissions

NAMESPACE = "fleet"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVES = serves_of(NAMESPACE)
GPUS_PER_NODE = 8
OLD, NEW, BAD = "worker:0.2.0", "worker:0.2.1", "worker:0.2.2"


class Fleet(Kubelets):
    """The nodes' kubelets, and what they see: of each ModelServe its ready workers by image."""

    def __init__(self, api: Api, size: int) -> None:
        super().__init__(api, PODS)
        self.size = size
        self.complete = False  # every ModelServe has had a ready worker
        self.least = 1  # ready workers of any ModelServe since
        self.most_on_their_way = self.deleted = 0

    def failure(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        why = {"reason": "ImagePullBackOff", "message": f"no image {image(pod)}"}
        return {"state": {"waiting": why}} if image(pod) == BAD else None

    def seen(self, event: str, pod: dict[str, Any], before: dict[str, Any] | None) -> None:
        self.deleted += event == "DELETED"
        self._judge()

    def _judge(self) -> None:
        ready: Counter[str] = Counter()
        starting: set[str] = set()
        for pod in self.pods.values():
            ready[owner(pod)] += is_ready(pod)
            if image(pod) != OLD and not is_ready(pod):
                starting.add(owner(pod))
        if not self.complete:
            self.complete = len(ready) == self.size and min(ready.values()) >= 1
            return
        self.least = min(self.least, *ready.values()) if len(ready) == self.size else 0
        self.most_on_their_way = max(self.most_on_their_way, len(starting))

    def on(self, node: str) -> set[str]:
        """ModelServes with a worker on a node."""
        return {owner(pod) for pod in self.pods.values() if pod["spec"].get("nodeName") == node}

    def images(self) -> Counter[str]:
        """Pods by image."""
        return Counter(map(image, self.pods.values()))


def settings(image: str, options: argparse.Namespace) -> dict[str, str]:
    return {
        "MODELSERVE_WORKER_IMAGE": image,
        "MODELSERVE_WORKER_POLICY": "Rolling",
        "MODELSERVE_ROLLING_BUDGET": str(options.budget),
    }


async def drain(plane: ControlPlane, fleet: Fleet, name: str) -> float:
    """Seconds that kubectl takes to drain the node."""
    for served in fleet.on(name):
        body = {"spec": {"rollout": {"onEviction": "SurgeFirst"}}}
        await fleet.api.send("PATCH", f"{SERVES}/{served}", body, content=MERGE)
    await budgets_hold(fleet.api, fleet.on(name))
    begun = time.monotonic()
    line = ("drain", name, "--delete-emptydir-data", "--timeout=300s")
    await asyncio.to_thread(plane.kubectl.run, *line, timeout_s=310)
    return time.monotonic() - begun


async def budgets_hold(api: Api, names: set[str]) -> None:
    """Wait until nobody may evict their workers."""
    path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
    while True:
        listed = await api.send("GET", path)
        allowed = {each["metadata"]["name"]: each["status"].get("disruptionsAllowed") for each in listed["items"]}
        if all(allowed[name] == 0 for name in names):
            return
        await asyncio.sleep(0.5)


async def measure(plane: ControlPlane, options: argparse.Namespace) -> bool:
    plane.kubectl.apply(*permissions())
    rng, size = random.Random(options.seed), options.model_serves
    async with Api.of(plane) as api:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await api.send("POST", "/api/v1/namespaces", space)
        nodes = -(-(size + 2 * options.budget) // GPUS_PER_NODE)
        for number in range(nodes):
            await add_node(api, f"gpu-{number:03d}", GPUS_PER_NODE)
        fleet = Fleet(api, size)
        watching = asyncio.create_task(fleet.watch())
        bodies = (model_serve(f"m{number:03d}", accelerators={"maxPerReplica": 1}) for number in range(size))
        await api.each(("POST", SERVES, body, "application/json") for body in bodies)
        operator = Operator.start(plane, settings=settings(OLD, options))
        try:
            took = await until("every ModelServe serves", lambda: fleet.complete, timeout_s=900)
            print(f"{size} ModelServes on {nodes} nodes serve with {OLD} after {took:.0f} s", flush=True)
            await all_ready(api, size)
            operator.stop()

            begun, killed = time.monotonic(), 0
            operator = Operator.start(plane, settings=settings(NEW, options))
            while fleet.images() != Counter({NEW: size}):
                if watching.done():
                    watching.result()
                wait = rng.uniform(5, 40)
                await asyncio.sleep(wait if killed < options.kills else 0.5)
                if killed < options.kills:
                    operator.process.kill()
                    killed += 1
                    operator = Operator.start(plane, settings=settings(NEW, options))
                    print(f"  kill {killed} after {time.monotonic() - begun:.0f} s: {dict(fleet.images())}", flush=True)
            await all_ready(api, size)
            took = time.monotonic() - begun
            print(
                f"moved to {NEW} in {took:.0f} s, {killed} times killed; on their way at once at most "
                f"{fleet.most_on_their_way} of {options.budget}; ready workers of any at least {fleet.least}; "
                f"pods ended {fleet.deleted}",
                flush=True,
            )
            most = fleet.most_on_their_way

            leaves, ended = "gpu-000", fleet.deleted
            there = fleet.on(leaves)
            took = await drain(plane, fleet, leaves)
            print(
                f"{leaves} with the only workers of {len(there)} ModelServes drained in {took:.0f} s: "
                f"{len(fleet.on(leaves))} left on it, pods ended {fleet.deleted - ended}, ready workers of any at "
                f"least {fleet.least}",
                flush=True,
            )
            drained = not fleet.on(leaves) and fleet.deleted - ended == len(there) > 0
            plane.kubectl.run("uncordon", leaves)  # room for the surge of what follows
            await all_ready(api, size)
            operator.stop()

            ended = fleet.deleted
            operator = Operator.start(plane, settings=settings(BAD, options))
            await until("one tries the image that fails", lambda: fleet.images()[BAD] == 1, timeout_s=120)
            took = await one_stalled(api)
            await asyncio.sleep(options.halt_s)
            print(
                f"{BAD} stalls the first after {took:.0f} s; {options.halt_s:.0f} s later: {fleet.images()[BAD]} pod "
                f"of it, {await ready(api)} Ready, ready workers of any at least {fleet.least}, pods ended "
                f"{fleet.deleted - ended}",
                flush=True,
            )
            listed = await api.send("GET", SERVES)
            waits = Counter(message(body) for body in listed["items"])
            print("what they say:", *(f"  {count} x {words}" for words, count in waits.most_common()), sep="\n")
            halted = fleet.images()[BAD] == 1 and fleet.deleted == ended
            return halted and drained and fleet.least >= 1 and most <= options.budget
        finally:
            operator.stop()
            watching.cancel()


async def ready(api: Api) -> int:
    """ModelServes that say Ready for the revision that was committed last."""
    listed = await api.send("GET", SERVES)
    states = [{each["type"]: each for each in body["status"]["conditions"]} for body in listed["items"]]
    return sum(each["Ready"]["status"] == "True" for each in states)


async def all_ready(api: Api, count: int) -> None:
    while await ready(api) < count:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.5)


async def one_stalled(api: Api) -> float:
    """Seconds until a ModelServe says so."""
    begun = time.monotonic()
    while True:
        listed = await api.send("GET", SERVES)
        if any(each["type"] == "Stalled" for body in listed["items"] for each in body["status"]["conditions"]):
            return time.monotonic() - begun
        await asyncio.sleep(0.5)


def message(body: dict[str, Any]) -> str:
    """Why it does not move, or what stalls it."""
    states = {each["type"]: each["message"] for each in body["status"]["conditions"]}
    return str(states.get("Stalled") or states["Planned"].rpartition("A newer worker waits: ")[2])[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-serves", type=int, default=200)
    parser.add_argument("--budget", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--halt-s", type=float, default=60.0, help="seconds to watch that nothing follows a bad image")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with control_plane() as plane, controllers(plane):
        sys.exit(0 if asyncio.run(measure(plane, options)) else 1)
