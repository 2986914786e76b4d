"""Times what one tenant does, alone and beside a hostile one.

    python tests/bench two_tenants [--rounds 2]

A real API server, scheduler and controllers, the real operator as a process, and nodes that this program plays. The
tenant has a full pool, on which workers may be down for a moment, and one with room. Measured, one after the other:

rollout   an edit of all on the full pool, until all are Ready with it: each stops its only worker for the next one
drain     every pod of a node is evicted, and again each half second while it may not be (kubectl asks every 5 s, by
          which a drain would take 5 or 10), of which workers surge first, until the node is empty
update    another worker image for the fleet (Rolling), until all of the tenant's are Ready with it

The other tenant has pods that can never start and ask for the same GPUs (no such node, more than a node has, a claim
that nobody made, an anti-affinity against itself), a pod that waits for the very GPUs with a lower priority, and
ModelServes: one whose spec is broken as it begins to move, one without room, one whose worker has never run, and ones
that ask for a buffer of a million and for host names of others. Its serving workers must all be there at the end.
Exit status 1 where the tenant takes more than 1.2 times as long beside the other one, and 15 s more: a ModelServe looks
that often whether it is its turn, and one update of twelve takes 100 or 180 s as these looks fall. What another tenant
must not cause are waits of minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from bench.operator.operator_scale import MERGE, Api
from bench.operator.played_kubelets import (
    GPU,
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

GOOD, BAD = "tenant-a", "tenant-b"
OLD, NEW = "worker:0.2.0", "worker:0.2.1"
CLASS = "serving"
FULL, ROOM = 3, 9  # ModelServes of the tenant on each pool
ON_NODE = 16  # GPUs of a node with room: each holds all workers of the pool
MOST_RATIO, LOOK_S = 1.2, 15.0
ALLOWED = [
    {"namespaces": [BAD], "bufferReplicas": 4, "hostnames": ["*.tenant-b.example"], "gateways": ["*"]},
    {"namespaces": ["*"]},
]


def one_gpu(name: str, pool: str, **spec: Any) -> dict[str, Any]:
    return model_serve(name, accelerators={"maxPerReplica": 1, "nodeSelector": {"pool": pool}}, **spec)


def pod(name: str, *, gpus: int = 1, **spec: Any) -> dict[str, Any]:
    resources = {"limits": {GPU: str(gpus)}} if gpus else {}
    container = {"name": "train", "image": "train:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "train"}},
        "spec": {"containers": [container], **spec},
    }


def hostile_pods() -> list[dict[str, Any]]:
    near = {"labelSelector": {"matchLabels": {"app": "nobody"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
    theirs = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "nobodys"}]}
    return [
        pod("no-such-node", nodeSelector={"nope": "x"}),
        pod("too-many", gpus=64),
        pod("claim-of-nobody", gpus=0, **theirs),
        pod("claim-beside", **theirs, nodeSelector={"pool": "other"}),
        pod("near-nobody", affinity=affinity),
        pod("waits-for-your-gpu", nodeSelector={"pool": "full"}),
    ]


class Nodes(Kubelets):
    """The kubelets, and what they see of workers: by ModelServe and image, whether one is ready."""

    def __init__(self, api: Api) -> None:
        super().__init__(api, "/api/v1/pods")
        self.broken: set[str] = set()  # ModelServes whose workers crash

    def failure(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such variable"}}
        waits = {"waiting": {"reason": "CrashLoopBackOff"}}
        return {"restartCount": 9, "state": waits, "lastState": ended} if owner(pod) in self.broken else None

    def ready(self, namespace: str) -> dict[str, set[str]]:
        """uids of ready workers by ModelServe."""
        found: dict[str, set[str]] = defaultdict(set)
        for (where, _), body in self.pods.items():
            if where == namespace and is_ready(body):
                found[owner(body)].add(body["metadata"]["uid"])
        return found

    def named_on(self, node: str) -> list[tuple[str, str]]:
        """Namespace and name of each pod of a node."""
        return [key for key, body in self.pods.items() if body["spec"].get("nodeName") == node]

    def on(self, name: str) -> int:
        return len(self.named_on(name))

    def tries(self, namespace: str, name: str) -> bool:
        """Whether a worker of it has the newer image."""
        return any(
            where == namespace and owner(body) == name and image(body) == NEW for (where, _), body in self.pods.items()
        )


def _ready(body: dict[str, Any]) -> bool:
    states = {each["type"]: each for each in (body.get("status") or {}).get("conditions") or ()}
    ready = states.get("Ready") or {}
    return ready.get("status") == "True" and ready.get("observedGeneration") == body["metadata"]["generation"]


async def all_ready(api: Api, namespace: str, names: set[str]) -> bool:
    listed = await api.send("GET", serves_of(namespace))
    return names <= {body["metadata"]["name"] for body in listed["items"] if _ready(body)}


class Trial:
    """One cluster, from the first worker to the last figure."""

    def __init__(self, plane: ControlPlane, api: Api, *, hostile: bool) -> None:
        self.plane, self.api, self.hostile = plane, api, hostile
        self.nodes = Nodes(api)
        self.full = {f"full-{number}" for number in range(FULL)}
        self.room = {f"room-{number}" for number in range(ROOM)}

    async def run(self) -> dict[str, float]:
        self.plane.kubectl.apply(*permissions())
        for namespace in (GOOD, BAD):
            await self.api.send("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        priority = {"metadata": {"name": CLASS}, "value": 1000}
        await self.api.send("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", priority)
        for name, pool, gpus in (
            ("full", "full", FULL),
            ("room-a", "room", ON_NODE),
            ("room-b", "room", ON_NODE),
            ("tiny", "tiny", 1),
        ):
            await add_node(self.api, name, gpus, pool=pool)
        watching = asyncio.create_task(self.nodes.watch())
        await asyncio.sleep(0.5)
        for name in sorted(self.full):
            more = {"rollout": {"allowDowntime": True}, "pod": {"priorityClassName": CLASS}}
            await self.api.send("POST", serves_of(GOOD), one_gpu(name, "full", **more))
        for name in sorted(self.room):
            await self.api.send("POST", serves_of(GOOD), one_gpu(name, "room", rollout={"onEviction": "SurgeFirst"}))
        if self.hostile:
            await self._settle_in()
        operator = self._operator(OLD)
        try:
            await until("the tenant serves", lambda: all_ready(self.api, GOOD, self.full | self.room))
            if self.hostile:
                await until("the other serves", lambda: all_ready(self.api, BAD, {"breaks", "no-room"}))
                for each in hostile_pods():
                    await self.api.send("POST", f"/api/v1/namespaces/{BAD}/pods", each)
                await until("its pods wait", lambda: sum(where == BAD for where, _ in self.nodes.pods) >= 7)
            found = {"rollout": await self._rollout(), "drain": await self._drain()}
            operator.stop()
            kept = self.nodes.ready(BAD)
            operator = self._operator(NEW)
            found["update"] = await self._update()
            if self.hostile:
                lost = [name for name, pods in kept.items() if not pods <= self.nodes.ready(BAD)[name]]
                print(f"  the other tenant's workers that ended: {lost or 'none'}", flush=True)
                await self._tell()
            return found
        finally:
            operator.stop()
            watching.cancel()

    def _operator(self, image: str) -> Operator:
        settings = {"MODELSERVE_WORKER_IMAGE": image, "MODELSERVE_WORKER_POLICY": "Rolling"}
        settings["MODELSERVE_ALLOWED"] = json.dumps(ALLOWED)
        return Operator.start(self.plane, settings=settings)

    async def _settle_in(self) -> None:
        """The other tenant, as it is before it shows what it is."""
        self.nodes.broken.add("never-ran")
        foreign = {"parentRefs": [{"name": "web", "namespace": GOOD}], "hostnames": ["api.tenant-a.example"]}
        for body in (
            one_gpu("a-million", "room", capacityBuffer={"replicas": 1_000_000}),
            one_gpu("breaks", "room"),
            one_gpu("foreign-host", "room", gateway=foreign),
            one_gpu("never-ran", "room"),
            one_gpu("no-room", "tiny"),
        ):
            await self.api.send("POST", serves_of(BAD), body)

    async def _rollout(self) -> float:
        begun = time.monotonic()
        for name in sorted(self.full):
            await self.api.send(
                "PATCH", f"{serves_of(GOOD)}/{name}", {"spec": {"context": {"maxModelLen": 8192}}}, content=MERGE
            )
        await until("the rollout", lambda: all_ready(self.api, GOOD, self.full))
        return time.monotonic() - begun

    async def _drain(self) -> float:
        leaves = max(("room-a", "room-b"), key=self.nodes.on)
        self.plane.kubectl.run("cordon", leaves)

        async def evicted() -> bool:
            for namespace, name in self.nodes.named_on(leaves):
                path = f"/api/v1/namespaces/{namespace}/pods/{name}"
                body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
                with contextlib.suppress(RuntimeError):  # 429: its disruption budget does not let it go yet
                    await self.api.send("POST", f"{path}/eviction", body)
            await asyncio.sleep(0.4)
            return not self.nodes.on(leaves)

        took = await until("the drain", evicted)
        self.plane.kubectl.run("uncordon", leaves)
        await until("all Ready again", lambda: all_ready(self.api, GOOD, self.full | self.room))
        return took

    async def _update(self) -> float:
        begun = time.monotonic()
        broken = asyncio.create_task(self._break_when_it_moves())

        async def moved() -> bool:
            on_newer = all(self.nodes.tries(GOOD, name) for name in self.full | self.room)
            return on_newer and await all_ready(self.api, GOOD, self.full | self.room)

        await until("the update", moved, timeout_s=900)
        took = time.monotonic() - begun
        broken.cancel()
        return took

    async def _break_when_it_moves(self) -> None:
        """A typo, at the worst moment."""
        await until("a move", lambda: self.nodes.tries(BAD, "breaks"), timeout_s=3600)
        await self.api.send(
            "PATCH", f"{serves_of(BAD)}/breaks", {"spec": {"plan": {"revision": "breaks-0000000000"}}}, content=MERGE
        )

    async def _tell(self) -> None:
        for body in (await self.api.send("GET", serves_of(BAD)))["items"]:
            states = {each["type"]: each for each in body["status"]["conditions"]}
            shown = states.get("Stalled") or states.get("Ready") or states["Planned"]
            print(f"  {body['metadata']['name']:>12}: {shown['reason']}: {shown['message'][:90]}", flush=True)


async def measure(*, hostile: bool) -> dict[str, float]:
    with control_plane() as plane, controllers(plane):
        async with Api.of(plane) as api:
            return await Trial(plane, api, hostile=hostile).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of both, one after the other; medians are compared")
    options = parser.parse_args()
    figures: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for hostile in (False, True):
            found = asyncio.run(measure(hostile=hostile))
            figures[hostile].append(found)
            shown = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in found.items())
            print(f"round {number + 1}, {'hostile' if hostile else 'alone'}: {shown}", flush=True)
    late = False
    for what in figures[False][0]:
        alone, beside = (statistics.median(each[what] for each in figures[hostile]) for hostile in (False, True))
        late |= beside > MOST_RATIO * alone + LOOK_S
        print(f"{what:>8}: alone {alone:6.1f} s, beside the hostile tenant {beside:6.1f} s: {beside / alone:.2f} x")
    sys.exit(late)
