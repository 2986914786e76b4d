"""Workers that take sets of adapters as the real ones do, beside the in-memory cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP, MODEL_ADAPTER, POD
from modelserve_operator.cluster.kube import WorkerRefusedError, WorkerUnreachableError

Body = dict[str, Any]


@dataclass
class AdapterWorker:
    """One worker. A version is Loading when it is told of, and what its address says once somebody has looked."""

    limit: int
    wanted: Body = field(default_factory=lambda: {"adapters": []})
    versions: dict[tuple[str, str], Body] = field(default_factory=dict)
    sets_taken: int = 0
    reachable: bool = True

    def put(self, body: Body) -> Body:
        asked = {(each["name"], one["id"]): one for each in body["adapters"] for one in each["versions"]}
        if len(asked) > self.limit:
            raise WorkerRefusedError(400, f"{len(asked)} versions; max is {self.limit}")
        self.sets_taken += 1
        self.wanted = body
        for key in set(self.versions) - set(asked):
            self.versions[key]["state"] = "Draining"
        for (name, version), one in asked.items():
            known = self.versions.get((name, version))
            if known is None or known["state"] == "Draining":
                self.versions[name, version] = _told(name, version, one["uri"], "Loading")
            self.versions[name, version]["weight"] = one["weight"]
        return self.get({}, settle=False)

    def get(self, broken: Mapping[str, str], *, settle: bool = True) -> Body:
        shown = [dict(each) for each in self.versions.values()]
        if settle:
            for key, each in tuple(self.versions.items()):
                if each["state"] == "Draining":
                    del self.versions[key]
                elif each["state"] == "Loading":
                    each.update(_outcome(each["uri"], broken))
        return {"limits": {"max": self.limit, "rank": 16, "slots": 4, "targets": []}, "adapters": shown}

    def weights(self, name: str) -> dict[str, int]:
        """By address, of what it may answer: versions that are Ready."""
        for each in self.wanted["adapters"]:
            if each["name"] == name:
                ready = {key[1] for key, one in self.versions.items() if key[0] == name and one["state"] == "Ready"}
                return {one["uri"]: one["weight"] for one in each["versions"] if one["id"] in ready}
        return {}


def _told(name: str, version: str, uri: str, state: str) -> Body:
    return {
        "name": name, "id": version, "uri": uri, "state": state, "reason": None, "message": None, "digest": None,
        "rank": None, "bytes": 0, "probe": None, "requests": 0, "laterField": 1,
    }  # fmt: skip


def _outcome(uri: str, broken: Mapping[str, str]) -> Body:
    if uri in broken:
        return {
            "state": broken[uri],
            "reason": "KeysDoNotBind",
            "message": "layers.0.self_attn.x_proj binds to nothing",
        }
    digest = f"sha256:{hashlib.sha256(uri.encode()).hexdigest()}"
    probe = {"kl": 0.0123456, "top1Changed": 0.25, "prompts": 8, "strength": {"qkv": 0.01234, "down": 3}}
    return {"state": "Ready", "digest": digest, "rank": 8, "bytes": 1 << 20, "probe": probe}


class AdapterFleet:
    """All workers of the cluster, by name of the pod; those that are new start by the ConfigMap that they mount."""

    def __init__(self, cluster: Any, *, limit: int) -> None:
        self.cluster, self.limit = cluster, limit
        self.workers: dict[str, AdapterWorker] = {}
        self.broken: dict[str, str] = {}  # address -> state that it ends in
        self.version_names = False  # whether they take NAME@ID for a version
        cluster.manage = self.manage

    def manage(self, name: str, path: str, key: str, body: Body | None) -> Body:
        worker = self.workers.setdefault(name, AdapterWorker(self.limit))
        assert path == "/v1/adapters"
        if not worker.reachable:
            raise WorkerUnreachableError(f"{name}{path}")
        self._check(name, key)
        answer = worker.get(self.broken) if body is None else worker.put(body)
        return {**answer, "versionNames": True} if self.version_names else answer

    def _check(self, name: str, key: str) -> None:
        (pod,) = (each for each in self.cluster.of(POD) if each["metadata"]["name"] == name)
        owner = labels.label_of(pod, labels.NAME)
        known = self.cluster.objects.get((CONFIG_MAP, pod["metadata"]["namespace"], f"{owner}-adapters"))
        if known is None:
            return  # it has no digest yet, and tells nobody more than what it has: nothing
        digest = known["data"]["management-keys"].strip().removeprefix("sha256:")
        if hashlib.sha256(key.encode()).hexdigest() != digest:
            raise WorkerRefusedError(401, "the API key is none of this server's keys")


def fleet_of_two(world: Any, spec: Body, facts: Any, *, room: int) -> AdapterFleet:
    """Two ready workers of `tiny`, with room for so many versions, in a cluster with the CRD."""
    world.serve(MODEL_ADAPTER)
    made = AdapterFleet(world.cluster, limit=room)
    world.create({**spec, "replicas": 2, "adapters": {"max": room}})
    world.cluster.end_job(message=facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    return made


def adapter(world: Any, name: str, *, namespace: str = "ml", model: str = "tiny", **spec: Any) -> None:
    """Create a ModelAdapter, as kubectl would."""
    reference = {"name": model, **({"namespace": "ml"} if namespace != "ml" else {})}
    body = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelAdapter",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"modelRef": reference, "uri": f"hf://team/{name}", **spec},
    }
    world.cluster.put(MODEL_ADAPTER, body)


def edit(world: Any, name: str, *, namespace: str = "ml", **fields: Any) -> None:
    world.cluster.change(MODEL_ADAPTER, name, lambda body: body["spec"].update(fields), namespace=namespace)


def shown(world: Any, name: str, *, namespace: str = "ml") -> Body:
    status: Body = world.cluster.objects[MODEL_ADAPTER, namespace, name]["status"]
    return status


def ready(world: Any, name: str, *, namespace: str = "ml") -> tuple[str, str]:
    (found,) = (each for each in shown(world, name, namespace=namespace)["conditions"] if each["type"] == "Ready")
    return found["status"], found["reason"]


def message(world: Any, name: str, *, namespace: str = "ml") -> str:
    (found,) = (each for each in shown(world, name, namespace=namespace)["conditions"] if each["type"] == "Ready")
    return str(found["message"])


def wait(world: Any, seconds: float = 3.0, times: int = 6) -> None:
    """Until what is on its way has arrived."""
    for _ in range(times):
        world.settle()
        world.pass_time(seconds)
