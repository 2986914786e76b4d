"""Plays the kubelets of nodes that are objects alone: a pod that got a node runs a second later, or fails as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.operator.operator_scale import NODES, STRATEGIC, Api
from localcluster.binaries import require_programs
from localcluster.control_plane import ControlPlane
from localcluster.processes import spawn

GPU, NAME = "nvidia.com/gpu", "serving.modelserve.dev/name"
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


async def add_node(api: Api, name: str, gpus: int, **labels: str) -> None:
    """A node of H200s, with the taint taken away that the API server has it begin with: no controller does it here."""
    resources = {"cpu": "960", "memory": "8Ti", "pods": "500", "ephemeral-storage": "9Ti", GPU: str(gpus)}
    labels |= {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"}
    labels |= {"nvidia.com/gpu.count": str(gpus), "kubernetes.io/hostname": name}
    status = {"capacity": resources, "allocatable": resources}
    await api.send("POST", NODES, {"metadata": {"name": name, "labels": labels}, "status": status})
    await api.send("PATCH", f"{NODES}/{name}", {"spec": {"taints": None}}, content=STRATEGIC)


def serves_of(namespace: str) -> str:
    return f"/apis/serving.modelserve.dev/v1alpha1/namespaces/{namespace}/modelserves"


def model_serve(name: str, *, model: str = "E2B", **spec: Any) -> dict[str, Any]:
    """A model whose facts ship with the package, at a commit, so that nothing asks the Hub."""
    stated = {"model": {"uri": f"hf://google/gemma-4-{model}-it", "revision": "a1" * 20}, **spec}
    kind = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe"}
    return {**kind, "metadata": {"name": name}, "spec": stated}


def owner(pod: dict[str, Any]) -> str:
    """The ModelServe whose worker it is; "" for a pod of somebody else."""
    return str(pod["metadata"].get("labels", {}).get(NAME, ""))


def image(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def is_ready(pod: dict[str, Any]) -> bool:
    states = {each["type"]: each["status"] for each in (pod.get("status") or {}).get("conditions") or ()}
    return states.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


async def until(what: str, done: Callable[[], Any], *, timeout_s: float = 300.0) -> float:
    """Seconds until `done`, which may be asked for asynchronously.

    Raises:
        RuntimeError: `what` did not come in time.
    """
    begun = time.monotonic()
    while True:
        found = done()
        if await found if asyncio.iscoroutine(found) else found:
            return time.monotonic() - begun
        if time.monotonic() - begun > timeout_s:
            raise RuntimeError(f"{what}: not within {timeout_s:.0f} s")
        await asyncio.sleep(0.1)


class Kubelets:
    """They start what got a node and end what is being deleted; `pods` are by namespace and name, as heard last."""

    def __init__(self, api: Api, path: str) -> None:
        """`path` is that of the pods to play for: of the cluster, or of a namespace."""
        self.api, self._path = api, path
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def failure(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """What the status of its container says otherwise, where it fails; asked once a pod."""

    def seen(self, event: str, pod: dict[str, Any], before: dict[str, Any] | None) -> None:
        """Told of every event of a pod, and of what was known of it."""

    def begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self) -> None:
        async for event in self.api.events(self._path):
            pod, metadata = event["object"], event["object"]["metadata"]
            key = (metadata["namespace"], metadata["name"])
            before = self.pods.pop(key, None)
            known = before or {"metadata": {}, "spec": {}}
            if event["type"] != "DELETED":
                self.pods[key] = pod
                path = f"/api/v1/namespaces/{key[0]}/pods/{key[1]}"
                if "nodeName" in pod["spec"] and "nodeName" not in known["spec"]:
                    self.begin(self._start(path, pod))
                if (
                    "deletionTimestamp" in metadata
                    and "deletionTimestamp" not in (before or {"metadata": {}})["metadata"]
                ):
                    self.begin(self.unless_gone("DELETE", path, {"gracePeriodSeconds": 0}))
            self.seen(event["type"], pod, before)

    async def _start(self, path: str, pod: dict[str, Any]) -> None:
        await asyncio.sleep(START_S)
        now, failure = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), self.failure(pod)
        well = failure is None
        container = {"name": "worker", "image": image(pod), "imageID": "", "restartCount": 0}
        container |= {"ready": well, "started": well, "state": {"running": {"startedAt": now}}, **(failure or {})}
        status = {
            "phase": "Running" if well or "lastState" in container else "Pending",
            "podIP": "192.0.2.1",
            "podIPs": [{"ip": "192.0.2.1"}],
            "startTime": now,
            "conditions": [
                {"type": kind, "status": str(well), "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [container],
        }
        await self.unless_gone("PATCH", f"{path}/status", {"status": status}, content=STRATEGIC)

    async def unless_gone(self, *request: Any, **options: Any) -> None:
        try:
            await self.api.send(*request, **options)
        except RuntimeError as error:
            if "404" not in str(error):
                raise
