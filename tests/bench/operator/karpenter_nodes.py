"""What a real Karpenter does for a ModelServe: nodes from an empty pool and back, none for what fails for ever.

    make karpenter

A real API server, etcd, scheduler and controllers (tests/cluster), the real operator, and Karpenter with its kwok cloud
provider, which makes Node objects and nothing that runs: what a kubelet would say of nodes and pods is written by this
program, the failure of a worker as well. Exit 1 says that a node was not brought, not removed, or brought too often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.operator.operator_scale import MERGE, NODES, STRATEGIC, Api
from bench.operator.played_kubelets import GPU, Kubelets, controllers, is_ready, model_serve, owner, serves_of, until
from bench.operator.scale_operator import Operator
from localcluster.binaries import module_folder, require_tool
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.operator_process import permissions
from localcluster.processes import free_ports, spawn

NAMESPACE = "ml"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVES = serves_of(NAMESPACE)
BUFFERS = f"/apis/autoscaling.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/capacitybuffers"
CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
DUE_S = (60, 180, 420)  # attempts follow after 1, 2 and 4 minutes
BROKEN = "broken"  # the ModelServe whose workers end with exit code 78
FAILURE = {"reason": "InvalidCheckpoint", "message": "model.safetensors is not there."}
GPU_NAME, GPU_COUNT = "karpenter.k8s.aws/instance-gpu-name", "karpenter.k8s.aws/instance-gpu-count"
POOL = "/apis/karpenter.sh/v1/nodepools/h200"


def instance_types() -> list[dict[str, Any]]:
    """A machine with one H200, one with eight, one with an L4, and one without a GPU."""
    found = []
    for name, cpu, memory, gpu, count, price in (
        ("gpu.h200", "24", "256Gi", "h200", "1", 8.0),
        ("gpu.8h200", "192", "2Ti", "h200", "8", 60.0),
        ("gpu.l4", "8", "64Gi", "l4", "1", 1.0),
        ("plain", "8", "64Gi", None, "", 0.4),
    ):
        resources = {"cpu": cpu, "memory": memory, "pods": "110", "ephemeral-storage": "1Ti"}
        wanted = [("karpenter.sh/capacity-type", "on-demand"), ("topology.kubernetes.io/zone", "zone-a")]
        if gpu is not None:
            resources[GPU] = count
            wanted += [(GPU_NAME, gpu), (GPU_COUNT, count)]
        requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in wanted]
        offering = {"Price": price, "Available": True, "Requirements": requirements}
        kinds = {"architecture": "amd64", "operatingSystems": ["linux"]}
        found.append({"name": name, **kinds, "offerings": [offering], "resources": resources})
    return found


def node_pool(name: str) -> dict[str, Any]:
    """A pool without a node that may bring this GPU, named as Karpenter on AWS does; empty nodes go after 5 s."""
    reference = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"}
    named = (
        (GPU_NAME, name),
        ("karpenter.sh/capacity-type", "on-demand"),
    )  # else a cheaper machine is sought among spot
    requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in named]
    taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
    spec = {"nodeClassRef": reference, "requirements": requirements, "taints": [taint], "expireAfter": "Never"}
    disruption = {
        "consolidationPolicy": "WhenEmptyOrUnderutilized",
        "consolidateAfter": "5s",
        "budgets": [{"nodes": "100%"}],
    }
    body = {"template": {"spec": spec}, "disruption": disruption}
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name}, "spec": body}


@contextmanager
def karpenter(plane: ControlPlane) -> Iterator[None]:
    """Karpenter with its definitions, two pools without nodes, and CapacityBuffers switched on."""
    program = require_tool("karpenter", print)
    folder = module_folder("karpenter", "sigs.k8s.io/karpenter")
    crds = [*sorted((folder / "pkg/apis/crds").glob("*.yaml")), *sorted((folder / "kwok/apis/crds").glob("*.yaml"))]
    for crd in crds:
        plane.kubectl.run("apply", "--server-side", "-f", str(crd))
    plane.kubectl.run("wait", "--for=condition=Established", "crd", "--all")
    node_class = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": {"name": "default"}}
    plane.kubectl.apply({**node_class, "spec": {}}, node_pool("h200"), node_pool("l4"))
    types = plane.folder / "instance_types.json"
    types.write_text(json.dumps(instance_types()))
    metrics, health = free_ports(2)
    environment = os.environ | {
        "KUBECONFIG": str(plane.folder / "admin.kubeconfig"),
        "DISABLE_LEADER_ELECTION": "true",
        "FEATURE_GATES": "CapacityBuffer=true",
        "INSTANCE_TYPES_FILE_PATH": str(types),
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(health),
        "SYSTEM_NAMESPACE": "default",
    }
    process = spawn([str(program)], log=plane.folder / "karpenter.log", environment=environment)
    try:
        yield
    finally:
        process.terminate(timeout_s=20)


class Seen(Kubelets):
    """What kubelets would say of nodes and pods, and what was seen of both."""

    def __init__(self, api: Api) -> None:
        super().__init__(api, PODS)
        self.began = time.monotonic()
        self.nodes: dict[str, dict[str, Any]] = {}
        self.bought = 0  # nodes that were brought so far
        self.failed = 0  # workers that were ended

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        watches = [asyncio.create_task(each) for each in (self._watch_nodes(), self.watch())]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()
            for task in watches:
                if task.done() and not task.cancelled() and task.exception():
                    raise task.exception()  # type: ignore[misc]

    async def _watch_nodes(self) -> None:
        async for event in self.api.events(NODES):
            node, name = event["object"], event["object"]["metadata"]["name"]
            if event["type"] == "DELETED":
                self.nodes.pop(name, None)
                self.say(f"node {self.kind(node)} is gone")
                continue
            if event["type"] == "ADDED":
                self.bought += 1
                self.say(f"node {self.kind(node)} is brought")
                self.begin(self._register(name))
            self.nodes[name] = node

    async def _register(self, name: str) -> None:
        """As a kubelet says Ready, and the node controller takes its taint away."""
        await asyncio.sleep(1.0)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now}
        status = {"conditions": [{**ready, "lastTransitionTime": now}]}
        await self.unless_gone("PATCH", f"{NODES}/{name}/status", {"status": status}, content=STRATEGIC)
        for _ in range(50):
            node = await self.api.send("GET", f"{NODES}/{name}")
            kept = [each for each in node["spec"].get("taints") or () if each["key"] != "node.kubernetes.io/not-ready"]
            version = node["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": version}, "spec": {"taints": kept}}
            try:
                await self.api.send("PATCH", f"{NODES}/{name}", body, content=MERGE)
                return
            except RuntimeError as error:  # Karpenter writes to it as well
                if "409" not in str(error):
                    raise

    def seen(self, event: str, pod: dict[str, Any], before: dict[str, Any] | None) -> None:
        node = pod["spec"].get("nodeName")
        if node and event != "DELETED" and not (before and before["spec"].get("nodeName")):
            asked = pod["spec"]["containers"][0]["resources"]["limits"].get(GPU)
            self.say(f"pod {self.worker(pod)} ({asked} {GPU}) is bound to {self.kind(self.nodes[node])}")

    def failure(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        if owner(pod) != BROKEN:
            return None
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"exitCode": 78, "message": json.dumps(FAILURE), "startedAt": now, "finishedAt": now}
        self.failed += 1
        self.say(f"pod {self.worker(pod)} ends with exit code 78 (written by this program)")
        waits = {"waiting": {"reason": "CrashLoopBackOff"}}
        return {"restartCount": 1, "state": waits, "lastState": {"terminated": ended}}

    @staticmethod
    def kind(node: dict[str, Any]) -> str:
        """A node in a word or two: its names are long."""
        labels = node["metadata"]["labels"]
        size = labels.get("node.kubernetes.io/instance-type", "").removeprefix("gpu.")
        return f"{size}/{node['metadata']['name'].rsplit('-', 1)[-1][:4]}"

    @staticmethod
    def worker(pod: dict[str, Any]) -> str:
        return f"{owner(pod)}/{pod['metadata']['name'].rsplit('-', 1)[-1]}"

    def ready(self, name: str) -> list[str]:
        """Nodes of the ready workers of a ModelServe."""
        return [pod["spec"]["nodeName"] for pod in self.pods.values() if owner(pod) == name and is_ready(pod)]


def on_h200(name: str, **spec: Any) -> dict[str, Any]:
    return model_serve(name, model="31B", accelerators={"products": ["NVIDIA-H200"]}, **spec)


async def condition(api: Api, name: str, kind: str) -> tuple[str, str, str]:
    body = await api.send("GET", f"{SERVES}/{name}")
    found = {each["type"]: each for each in body["status"].get("conditions", ())}.get(kind, {})
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


async def waits_for(seen: Seen, name: str, kind: str, reason: str) -> None:
    for _ in range(600):
        status, found, message = await condition(seen.api, name, kind)
        if found == reason:
            seen.say(f"{name}: {kind} {status}, {reason}: {message[:150]}")
            return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{name}: {kind} is {await condition(seen.api, name, kind)}, not {reason}")


async def from_nothing_and_back(seen: Seen) -> None:
    print("\n# from an empty pool to a bound worker, and back", flush=True)
    await seen.api.send("POST", SERVES, on_h200("gemma"))
    seen.say("ModelServe gemma is created; there is no node")
    await until("a worker is ready", lambda: seen.ready("gemma"))
    await waits_for(seen, "gemma", "Ready", "RolledOut")
    assert seen.bought == 1, seen.bought
    (node,) = seen.nodes.values()
    assert node["metadata"]["labels"]["karpenter.sh/nodepool"] == "h200", "the cheaper L4 was left alone"
    await scale(seen, "gemma", 0)
    await until("the node goes", lambda: not seen.nodes)


async def scale(seen: Seen, name: str, replicas: int) -> None:
    await seen.api.send("PATCH", f"{SERVES}/{name}", {"spec": {"replicas": replicas}}, content=MERGE)
    seen.say(f"{name} is scaled to {replicas}")


async def warm_room(seen: Seen) -> None:
    print("\n# room for the first worker, kept by a CapacityBuffer (feature gate on)", flush=True)
    await seen.api.send("PATCH", f"{SERVES}/gemma", {"spec": {"capacityBuffer": {"replicas": 1}}}, content=MERGE)
    await until("a node is brought for nobody", lambda: seen.nodes)
    await waits_for(seen, "gemma", "CapacityBuffered", "BufferProvisioned")
    before = seen.bought
    await scale(seen, "gemma", 1)
    await until("a worker is ready", lambda: seen.ready("gemma"))
    seen.say(f"the worker found its node there: {before} brought before, and the room is made again")
    await until("the room is made again", lambda: seen.bought == before + 1)
    await seen.api.send("PATCH", f"{SERVES}/gemma", {"spec": {"capacityBuffer": None}}, content=MERGE)
    await until("the spare node goes", lambda: len(seen.nodes) == 1)


async def allow(seen: Seen, *counts: str) -> None:
    """The pool h200 may bring machines with so many GPUs."""
    found = (await seen.api.send("GET", POOL))["spec"]["template"]["spec"]
    kept = [each for each in found["requirements"] if each["key"] != GPU_COUNT]
    kept.append({"key": GPU_COUNT, "operator": "In", "values": list(counts)})
    await seen.api.send("PATCH", POOL, {"spec": {"template": {"spec": {"requirements": kept}}}}, content=MERGE)
    seen.say(f"NodePool h200 may bring machines of {' or '.join(counts)} GPUs")


async def why_blocked(seen: Seen) -> str:
    """What Karpenter's Event says of the node."""
    listed = await seen.api.send(
        "GET", "/api/v1/events?fieldSelector=reason=DisruptionBlocked,involvedObject.kind=Node"
    )
    return max((each["lastTimestamp"], each["message"]) for each in listed["items"])[1]


async def consolidation(seen: Seen, watch_s: float) -> None:
    print(
        "\n# a cheaper machine would do: the only worker is spared, for as long as its annotations say so", flush=True
    )
    await allow(seen, "8")
    await scale(seen, "gemma", 1)
    await until("a worker is ready", lambda: seen.ready("gemma"))
    (before,) = seen.ready("gemma")
    await allow(seen, "1", "8")
    await asyncio.sleep(watch_s)
    assert seen.ready("gemma") == [before]
    assert list(seen.nodes) == [before]
    seen.say(f"{watch_s:.0f} s later it is where it was; Karpenter: {await why_blocked(seen)}")
    ((_, pod),) = seen.pods
    gone = {"karpenter.sh/do-not-disrupt": None, "serving.modelserve.dev/held": None}
    await seen.api.send("PATCH", f"{PODS}/{pod}", {"metadata": {"annotations": gone}}, content=MERGE)
    seen.say("for comparison: its annotations are taken away by hand")
    await until("Karpenter moves it", lambda: before not in seen.nodes and seen.ready("gemma"), timeout_s=180)
    (after,) = seen.nodes.values()
    assert after["status"]["allocatable"][GPU] == "1"
    seen.say(f"now it is on {seen.kind(after)}")


async def only_replica(seen: Seen) -> None:
    print("\n# the NodeClaim of the only worker is deleted: another is ready before it goes", flush=True)
    await seen.api.send("PATCH", f"{SERVES}/gemma", {"spec": {"rollout": {"onEviction": "SurgeFirst"}}}, content=MERGE)
    (before,) = seen.ready("gemma")
    claims = await seen.api.send("GET", CLAIMS)
    (name,) = [each["metadata"]["name"] for each in claims["items"] if each["status"].get("nodeName") == before]
    await seen.api.send("DELETE", f"{CLAIMS}/{name}")
    seen.say(f"its NodeClaim is deleted: Karpenter taints and drains {seen.kind(seen.nodes[before])}")
    least = 1
    for _ in range(900):
        least = min(least, len(seen.ready("gemma")))
        if before not in seen.nodes and len(seen.ready("gemma")) == 1:
            break
        await asyncio.sleep(0.1)
    assert seen.ready("gemma") != [before]
    assert least == 1, "there was a moment without a ready worker"
    seen.say("ready workers at every moment: at least 1")
    await scale(seen, "gemma", 0)
    await until("the node goes", lambda: not seen.nodes)


async def fails_for_ever(seen: Seen, watch_s: float) -> None:
    print("\n# a worker that fails for ever: at most one node for each attempt", flush=True)
    before, begun = seen.bought, time.monotonic()
    await seen.api.send("POST", SERVES, on_h200(BROKEN, replicas=3, capacityBuffer={"replicas": 2}))
    await waits_for(seen, BROKEN, "Stalled", "InvalidCheckpoint")
    await asyncio.sleep(watch_s)
    took, bought = time.monotonic() - begun, seen.bought - before
    attempts, due = seen.failed - 2, 1 + sum(delay < took for delay in DUE_S)  # the first one with three workers
    seen.say(f"after {took:.0f} s: {attempts} attempts of {due} due; nodes: 3 for the first, {bought - 3} since")
    assert 2 <= attempts <= due, "it is tried again, and not more often"
    assert bought - 3 <= attempts - 1, "a node more than attempts"
    await waits_for(seen, BROKEN, "CapacityBuffered", "BufferWithheld")
    await seen.api.send("DELETE", f"{SERVES}/{BROKEN}")


async def show(plane: ControlPlane, *, consolidation_s: float, failing_s: float) -> None:
    async with Api.of(plane) as api:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await api.send("POST", "/api/v1/namespaces", space)
        seen = Seen(api)
        async with seen.running():
            await asyncio.sleep(0.5)
            await allow(seen, "1")
            await from_nothing_and_back(seen)
            await warm_room(seen)
            await scale(seen, "gemma", 0)
            await until("the node goes", lambda: not seen.nodes)
            await consolidation(seen, consolidation_s)
            await only_replica(seen)
            await fails_for_ever(seen, failing_s)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with control_plane() as plane:
        try:
            with controllers(plane), karpenter(plane):
                plane.kubectl.apply(*permissions())
                operator = Operator.start(plane, settings={"MODELSERVE_WORKER_IMAGE": "worker:0.2.0"})
                try:
                    asyncio.run(show(plane, consolidation_s=45.0, failing_s=200.0))
                except (RuntimeError, AssertionError) as error:
                    sys.exit(f"not as it should be: {error}")
                finally:
                    operator.stop()
        finally:
            if kept := os.environ.get("KEEP_LOGS"):
                for name in ("karpenter.log", "operator.log", "kube-scheduler.log"):
                    if (plane.folder / name).exists():
                        Path(kept, name).write_bytes((plane.folder / name).read_bytes())
    print("all of it as it should be")
