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
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.operator.operator_scale import MERGE, STRATEGIC, Api
from bench.operator.scale_operator import Operator
from localcluster.binaries import require_programs
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.operator_process import permissions
from localcluster.processes import spawn

NAMESPACE = "fleet"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVES = f"/apis/serving.modelserve.dev/v1alpha1/namespaces/{NAMESPACE}/modelserves"
NODES = "/api/v1/nodes"
GPUS_PER_NODE = 8
NAME = "serving.modelserve.dev/name"
OLD, NEW, BAD = "worker:0.2.0", "worker:0.2.1", "worker:0.2.2"
CONTROLLERS = ("deployment", "replicaset", "endpointslice", "disruption", "garbagecollector")
START_S = 1.0  # from a node to Ready


@contextmanager
def controllers(plane: ControlPlane) -> Iterator[None]:
    """The scheduler and the controllers that make pods of Deployments, beside the API server."""
    programs, common = require_programs(lambda _: None), (f"--kubeconfig={plane.folder / 'admin.kubeconfig'}",)
    common += ("--leader-elect=false", "--secure-port=0")
    lines = {"kube-scheduler": (), "kube-controller-manager": (f"--controllers={','.join(CONTROLLERS)}",)}
    started = [
        spawn([str(programs[name]), *common, *more], log=plane.folder / f"{name}.log", environment={})
        for name, more in lines.items()
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate(timeout_s=20)


def node(number: int) -> dict[str, Any]:
    resources = {"cpu": "960", "memory": "8Ti", "pods": "500", "ephemeral-storage": "9Ti"}
    resources["nvidia.com/gpu"] = str(GPUS_PER_NODE)
    labels = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771", "nvidia.com/gpu.count": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"gpu-{number:03d}", "labels": labels},
        "status": {"capacity": resources, "allocatable": resources},
    }


def model_serve(number: int) -> dict[str, Any]:
    """One GPU of a model whose facts ship with the package, at a commit, so that nothing asks the Hub."""
    spec = {"model": {"uri": "hf://google/gemma-4-E2B-it", "revision": "a1" * 20}, "accelerators": {"maxPerReplica": 1}}
    metadata = {"name": f"m{number:03d}", "namespace": NAMESPACE}
    return {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": metadata, "spec": spec}


@dataclass
class Fleet:
    """The nodes' kubelet, and what it sees: of each ModelServe its ready workers by image."""

    api: Api
    size: int
    budget: int
    pods: dict[str, tuple[str, str, bool]] = field(default_factory=dict)  # name -> ModelServe, image, ready
    complete: bool = False  # every ModelServe has had a ready worker
    least: int = 1  # ready workers of any ModelServe since
    most_on_their_way: int = 0
    deleted: int = 0
    nodes: dict[str, str] = field(default_factory=dict)  # by pod
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def watch(self) -> None:
        async for event in self.api.events(PODS):
            pod = event["object"]
            metadata = pod["metadata"]
            if event["type"] == "DELETED":
                self.deleted += 1
                self.pods.pop(metadata["name"], None)
            else:
                self._note(pod)
                self._act(pod)
            self._judge()

    def _note(self, pod: dict[str, Any]) -> None:
        states = {each["type"]: each["status"] for each in (pod.get("status") or {}).get("conditions") or ()}
        ready = states.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
        image = pod["spec"]["containers"][0]["image"]
        self.nodes[pod["metadata"]["name"]] = pod["spec"].get("nodeName", "")
        self.pods[pod["metadata"]["name"]] = (pod["metadata"]["labels"][NAME], image, ready)

    def _act(self, pod: dict[str, Any]) -> None:
        """As a kubelet does: end what is being deleted, start what has a node."""
        name, started = pod["metadata"]["name"], bool((pod.get("status") or {}).get("containerStatuses"))
        if "deletionTimestamp" in pod["metadata"]:
            self._begin(self._end(name))
        elif "nodeName" in pod["spec"] and not started:
            self._begin(self._start(name, pod))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _end(self, name: str) -> None:
        try:
            await self.api.send("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
        except RuntimeError as error:  # it has gone meanwhile
            if "404" not in str(error):
                raise

    async def _start(self, name: str, pod: dict[str, Any]) -> None:
        image = pod["spec"]["containers"][0]["image"]
        await asyncio.sleep(START_S)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = image != BAD
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": f"no image {image}"}}
        container = {"name": "worker", "image": image, "imageID": "", "restartCount": 0, "ready": ready}
        state = {"running": {"startedAt": now}} if ready else waiting
        told = {
            "phase": "Running" if ready else "Pending",
            "podIP": "192.0.2.1",
            "podIPs": [{"ip": "192.0.2.1"}],
            "conditions": [
                {"type": kind, "status": str(ready), "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [{**container, "started": ready, "state": state}],
        }
        try:
            await self.api.send("PATCH", f"{PODS}/{name}/status", {"status": told}, content=STRATEGIC)
        except RuntimeError as error:
            if "404" not in str(error):
                raise

    def _judge(self) -> None:
        ready: Counter[str] = Counter()
        images: dict[str, set[str]] = defaultdict(set)
        starting: set[str] = set()
        for name, image, is_ready in self.pods.values():
            ready[name] += is_ready
            images[name].add(image)
            if image != OLD and not is_ready:
                starting.add(name)
        if not self.complete:
            self.complete = len(ready) == self.size and min(ready.values()) >= 1
            return
        self.least = min(self.least, *ready.values()) if len(ready) == self.size else 0
        self.most_on_their_way = max(self.most_on_their_way, len(starting))

    def on(self, node: str) -> set[str]:
        """ModelServes with a worker on a node."""
        return {name for pod, (name, *_) in self.pods.items() if self.nodes[pod] == node}

    def images(self) -> Counter[str]:
        """Pods by image."""
        return Counter(image for _, image, _ in self.pods.values())


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


async def until(what: str, ready: Any, *, timeout_s: float) -> float:
    begun = time.monotonic()
    while not ready():
        if time.monotonic() - begun > timeout_s:
            raise RuntimeError(f"{what}: not within {timeout_s:.0f} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - begun


async def measure(plane: ControlPlane, options: argparse.Namespace) -> bool:
    plane.kubectl.apply(*permissions())
    rng, size = random.Random(options.seed), options.model_serves
    async with Api.of(plane) as api:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await api.send("POST", "/api/v1/namespaces", space)
        nodes = -(-(size + 2 * options.budget) // GPUS_PER_NODE)
        plain = "application/json"
        await api.each(("POST", NODES, node(number), plain) for number in range(nodes))
        for number in range(nodes):  # the API server has them begin so; there is no node controller to take it away
            await api.send("PATCH", f"{NODES}/gpu-{number:03d}", {"spec": {"taints": None}}, content=STRATEGIC)
        fleet = Fleet(api, size, options.budget)
        watching = asyncio.create_task(fleet.watch())
        await api.each(("POST", SERVES, model_serve(number), plain) for number in range(size))
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
