"""An in-memory cluster: enough of the API server, the workload controllers and the kubelet to be honest.

It applies server-side (fields that an apply drops are gone), bumps resource versions only on change, sends an event
for each change, collects children of deleted owners, and runs pods only when a test says what becomes of them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from modelserve.api import CalibrationTerm
from modelserve.api.schema_types import UNOBSERVED
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.model.weight_format import BFLOAT16
from modelserve.planning import ENGINE_VERSION
from modelserve_operator import labels
from modelserve_operator.adapter_reconcile import AdapterReconciler
from modelserve_operator.cache_reconcile import CacheReconciler
from modelserve_operator.cluster.kinds import (
    CLAIM,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    ENDPOINT_SLICE,
    EVENT,
    JOB,
    MODEL_ADAPTER,
    MODEL_CACHE,
    MODEL_SERVE,
    NODE,
    OPTIONAL,
    POD,
    SERVICE,
    WATCHED,
    ResourceKind,
)
from modelserve_operator.cluster.kube import KubeError, WorkerUnreachableError
from modelserve_operator.cluster.store import Store, key_of
from modelserve_operator.gathering.adapter_gatherer import AdapterGatherer
from modelserve_operator.gathering.cache_gatherer import CacheGatherer
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.management_key import ManagementKeys
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reconcile import Reconciler
from modelserve_operator.settings import Settings
from modelserve_operator.writing.apply import Applier

Body = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the operator asks for by a method of `Kube`, its `verb`."""

    verb: str
    kind: ResourceKind
    name: str = ""
    body: Any = None
    subresource: str | None = None


Between = Callable[[Request], Awaitable[None] | None]


class FakeCluster:
    """Implements `Kube`. `writes` records what came through it; changes made with `put` are somebody else's.

    A test has `asked` called before a request is looked at, and `answered` before its answer arrives: who raises there
    is what the operator hears in place of it.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[ResourceKind, str, str], Body] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.events: list[Body] = []
        self.worker_plans: dict[str, Body] = {}
        self.manage: Callable[[str, str, str, Body | None], Body] = _nobody_there  # worker, path, key, body
        self.hub: str | None = "c0" * 20  # commit that every branch of the Hub stands for now; None: no pod has told
        self.hub_asked = 0
        self.happenings: dict[str, list[Body]] = {}  # uid -> Events of others about it
        self.clock: Callable[[], datetime] = lambda: datetime(2026, 1, 1, tzinfo=UTC)
        self.refused_kinds: dict[ResourceKind, int] = dict.fromkeys(OPTIONAL, 404)  # kind -> status of its LIST
        self.admission: Callable[[ResourceKind, Body], None] | None = None  # a mutating webhook
        self.listener: Callable[[ResourceKind, Body, bool], None] | None = None
        self.asked: Between | None = None
        self.answered: Between | None = None
        self._numbers = itertools.count(1)
        self._applied: dict[str, Body] = {}  # uid -> what the operator last applied: its own fields

    # --- the interface that the operator uses --------------------------------------------------------------------

    async def pages(
        self, kind: ResourceKind, *, namespace: str | None = None, owner: str | None = None
    ) -> AsyncIterator[list[Body]]:
        await _call(self.asked, Request("pages", kind))
        if kind in self.refused_kinds:
            raise KubeError(self.refused_kinds[kind], f"GET {kind.path()}")
        items = [
            copy.deepcopy(body)
            for (each, space, _), body in self.objects.items()
            if each is kind and namespace in (None, space) and (not kind.owned or _ours(body))
            if owner in (None, labels.label_of(body, labels.NAME))
        ]
        await _call(self.answered, Request("pages", kind))
        yield items

    async def get(self, kind: ResourceKind, *, namespace: str, name: str) -> Body | None:
        await _call(self.asked, Request("get", kind, name))
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def apply(self, kind: ResourceKind, body: Mapping[str, Any]) -> Body:
        document = json.loads(json.dumps(body))  # as the wire would carry it
        space, name = key_of(document)
        request = Request("apply", kind, name, document)
        await _call(self.asked, request)
        self.writes.append(("apply", kind.kind, name))
        before = self.objects.get((kind, space, name))
        if before is None:
            merged = document
        else:
            merged = _apply_over(before, document, dropped=self._applied.get(before["metadata"]["uid"], {}))
        self._admit(kind, merged)
        stored = self._store(kind, merged)
        self._applied[stored["metadata"]["uid"]] = document
        await _call(self.answered, request)
        return copy.deepcopy(stored)

    async def json_patch(
        self,
        kind: ResourceKind,
        *,
        namespace: str,
        name: str,
        operations: Sequence[Mapping[str, Any]],
        subresource: str | None = None,
    ) -> Body:
        request = Request("json_patch", kind, name, operations, subresource)
        await _call(self.asked, request)
        self.writes.append((f"patch{'/' + subresource if subresource else ''}", kind.kind, name))
        if (kind, namespace, name) not in self.objects:
            raise KubeError(404, f"{kind.plural} {name} not found")
        body = copy.deepcopy(self.objects[kind, namespace, name])
        for operation in operations:
            *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
            place: Any = body
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            if operation["op"] == "test":
                if place[last] != operation["value"]:
                    raise KubeError(422, f"testing value {operation['path']} failed")
            elif operation["op"] == "remove":
                del place[int(last) if isinstance(place, list) else last]
            else:
                place[last] = copy.deepcopy(operation["value"])
        self._admit(kind, body)
        stored = self._store(kind, body)
        await _call(self.answered, request)
        return copy.deepcopy(stored)

    def _admit(self, kind: ResourceKind, body: Body) -> None:
        spec = body.get("spec") or {}
        if kind is DISRUPTION_BUDGET and {"minAvailable", "maxUnavailable"} <= spec.keys():
            raise KubeError(422, "minAvailable and maxUnavailable cannot be both set")
        if self.admission is not None:
            self.admission(kind, body)

    async def create(self, kind: ResourceKind, body: Mapping[str, Any]) -> None:
        self.writes.append(("create", kind.kind, str(body["reason"])))
        self.events.append(dict(body))

    async def delete(self, kind: ResourceKind, *, namespace: str, name: str, uid: str) -> None:
        await _call(self.asked, Request("delete", kind, name))
        self.writes.append(("delete", kind.kind, name))
        if self.objects.get((kind, namespace, name), {}).get("metadata", {}).get("uid") == uid:
            self.remove(kind, namespace, name)
        await _call(self.answered, Request("delete", kind, name))

    async def unplaced_pods(self, *, namespace: str | None = None) -> AsyncIterator[list[Body]]:
        await _call(self.asked, Request("unplaced_pods", POD))
        pods = [body for body in self.of(POD) if namespace in (None, body["metadata"]["namespace"])]
        yield [body for body in pods if "nodeName" not in body["spec"] and body["status"]["phase"] == "Pending"]

    async def events_about(self, *, namespace: str, uid: str) -> list[Body]:
        if EVENT in self.refused_kinds:
            raise KubeError(self.refused_kinds[EVENT], "events is forbidden")
        return self.happenings.get(uid, [])

    async def read_worker(self, pod: Mapping[str, Any], path: str) -> Body:
        await _call(self.asked, Request("read_worker", POD, pod["metadata"]["name"]))
        try:
            return self.worker_plans[pod["metadata"]["name"]]
        except KeyError:
            raise WorkerUnreachableError(f"{pod['metadata']['name']}{path}") from None

    async def manage_worker(
        self, pod: Mapping[str, Any], path: str, *, key: str, body: Mapping[str, Any] | None = None
    ) -> Body:
        name = pod["metadata"]["name"]
        await _call(self.asked, Request("manage_worker", POD, name, body, path))
        answer = self.manage(name, path, key, json.loads(json.dumps(body)))
        await _call(self.answered, Request("manage_worker", POD, name, body, path))
        return answer

    # --- what users, controllers and kubelets do ------------------------------------------------------------------

    def put(self, kind: ResourceKind, body: Mapping[str, Any]) -> Body:
        """Create or replace an object; the generation grows with the spec."""
        return self._store(kind, json.loads(json.dumps(body)))

    def change(self, kind: ResourceKind, name: str, change: Callable[[Body], None], *, namespace: str = "ml") -> None:
        body = copy.deepcopy(self.objects[kind, namespace if kind.namespaced else "", name])
        change(body)
        self._store(kind, body)

    def remove(self, kind: ResourceKind, namespace: str, name: str) -> None:
        """Delete an object and, as the garbage collector does, its children."""
        if self.objects[kind, namespace, name]["metadata"].get("finalizers"):
            asked = self.clock().strftime("%Y-%m-%dT%H:%M:%SZ")
            mark = {"deletionTimestamp": asked}
            self.change(kind, name, lambda body: body["metadata"].update(mark), namespace=namespace)
            return
        body = self.objects.pop((kind, namespace, name))
        uid = body["metadata"]["uid"]
        self._tell(kind, body, deleted=True)
        for (child_kind, space, child), other in tuple(self.objects.items()):
            if any(reference["uid"] == uid for reference in other["metadata"].get("ownerReferences") or ()):
                self.remove(child_kind, space, child)

    def of(self, kind: ResourceKind) -> list[Body]:
        return [
            body for (each, _, _), body in sorted(self.objects.items(), key=lambda item: item[0][2]) if each is kind
        ]

    def run_controllers(self) -> None:
        """Give Deployments and Jobs the pods they ask for; the pods have no state yet."""
        for deployment in self.of(DEPLOYMENT):
            wanted = deployment["spec"]["replicas"]
            there = [pod for pod in self.pods_of(deployment) if _active(pod)]
            pods = sorted(there, key=_stays_longer, reverse=True)
            for pod in pods[wanted:]:
                self.remove(POD, *key_of(pod))
            for _ in range(wanted - len(pods)):
                self._make_pod(deployment, {})
        for service in self.of(SERVICE):
            self._make_endpoints(service)
        for job in self.of(JOB):
            if not self.pods_of(job):
                self._make_pod(job, {"batch.kubernetes.io/job-name": job["metadata"]["name"]})

    def pods_of(self, owner: Body) -> list[Body]:
        uid = owner["metadata"]["uid"]
        return [pod for pod in self.of(POD) if _owner_uid(pod) == uid]

    def set_pod(self, pod: Body, **status: Any) -> None:
        """Another status; containers that ended before the worker began stay as they ended."""

        def change(body: Body) -> None:
            began = {key: value for key, value in body["status"].items() if key == "initContainerStatuses"}
            body["status"] = {**began, **status}

        self.change(POD, pod["metadata"]["name"], change, namespace=pod["metadata"]["namespace"])

    def make_ready(
        self, deployment: Body, *, max_model_len: int | None = None, surplus: Mapping[str, int] | None = None
    ) -> None:
        """All pods of a Deployment turn Ready and answer /v1/plan.

        Weights take the planned bytes, activation and context half of theirs; `surplus` adds bytes to terms. The pool
        is what is left of the plan's budget. Less of a pool does not shorten the context unless the test says so.
        """
        plan = self.committed_plan(deployment)
        predicted = plan["perGpu"]
        terms = {
            "weights": predicted["weightsBytes"],
            "activation": predicted["activationBytes"] // 2,
            "context": predicted["overheadBytes"] // 2,
        }
        terms = {name: size + (surplus or {}).get(name, 0) for name, size in terms.items()}
        pool = sum(predicted.values()) - sum(terms.values())
        names = ("weightsBytes", "activationBytes", "overheadBytes", "kvPoolBytes")
        before = dict(zip((*terms, "pool"), (predicted[name] for name in names), strict=True))
        for pod in filter(_active, self.pods_of(deployment)):
            self.worker_plans[pod["metadata"]["name"]] = {
                "maxModelLen": max_model_len or plan["maxModelLen"],
                "perGpu": predicted,
                "allocated": dict(zip(names, (*terms.values(), pool), strict=True)),
                "engineVersion": ENGINE_VERSION,
                "terms": [
                    CalibrationTerm.compare(name, predicted_bytes=before[name], measured_bytes=size).to_json()
                    for name, size in (*terms.items(), ("pool", pool))
                ],
            }
            conditions = [{"type": "Ready", "status": "True"}]
            self.set_pod(pod, phase="Running", podIP="10.0.0.1", conditions=conditions)

    def _resolved(self, namespace: str, pod: Body) -> Body:
        """What the container `resolve` of a pod told: the commit of its mounted file, else what the Hub says now."""
        if self.hub is None or not any(each["name"] == "resolve" for each in pod.get("initContainers", ())):
            return {}
        (volume,) = (each for each in pod["volumes"] if each["name"] == "commit")
        recorded = self.objects.get((CONFIG_MAP, namespace, volume["configMap"]["name"]))
        self.hub_asked += recorded is None
        commit = recorded["data"]["commit"] if recorded is not None else self.hub
        ended = {"terminated": {"exitCode": 0, "message": json.dumps({"commit": commit})}}
        return {"initContainerStatuses": [{"name": "resolve", "state": ended}]}

    def committed_plan(self, deployment: Body) -> Body:
        """The plan of a Deployment's revision."""
        plan: Body = self.objects[CONTROLLER_REVISION, *key_of(deployment)]["data"]["plan"]
        return plan

    def end_job(self, *, message: str, exit_code: int = 0, name: str | None = None) -> None:
        """The inspect pod ends, of several the one of this Job; with another exit code than 0 its Job fails."""
        (job,) = (each for each in self.of(JOB) if name in (None, each["metadata"]["name"]))
        (pod,) = self.pods_of(job)
        ended = {"terminated": {"exitCode": exit_code, "message": message}}
        phase = "Failed" if exit_code else "Succeeded"
        self.set_pod(pod, phase=phase, containerStatuses=[{"name": "inspect", "state": ended}])
        condition = {"type": "Failed" if exit_code else "Complete", "status": "True", "message": "ended"}
        condition["lastTransitionTime"] = self.clock().isoformat(timespec="seconds")
        self.change(JOB, job["metadata"]["name"], lambda body: body.update(status={"conditions": [condition]}))

    def _make_endpoints(self, service: Body) -> None:
        """The EndpointSlice of a Service: its labels, and the ready pods that it selects."""
        metadata, selector = service["metadata"], service["spec"].get("selector") or {}
        chosen = [
            pod
            for pod in self.of(POD)
            if selector and selector.items() <= (pod["metadata"].get("labels") or {}).items() and _ready(pod)
        ]
        references = [{"kind": "Pod", "uid": pod["metadata"]["uid"]} for pod in chosen]
        own = {
            "name": f"{metadata['name']}-endpoints",
            "namespace": metadata["namespace"],
            "labels": {**(metadata.get("labels") or {}), "kubernetes.io/service-name": metadata["name"]},
            "ownerReferences": [{"uid": metadata["uid"], "name": metadata["name"]}],
        }
        endpoints = [{"targetRef": each, "conditions": {"ready": True}} for each in references]
        self.put(ENDPOINT_SLICE, {"metadata": own, "endpoints": endpoints})

    def _make_pod(self, owner: Body, extra: Mapping[str, str]) -> None:
        name = f"{owner['metadata']['name']}-{next(self._numbers)}"
        template = owner["spec"]["template"]
        metadata = {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": {**template["metadata"]["labels"], **extra},
            "annotations": dict(template["metadata"].get("annotations") or {}),
            "ownerReferences": [{"uid": owner["metadata"]["uid"], "name": owner["metadata"]["name"]}],
        }
        began = self._resolved(metadata["namespace"], template["spec"])
        self.put(POD, {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending", **began}})

    def _store(self, kind: ResourceKind, body: Body) -> Body:
        space, name = key_of(body)
        before = self.objects.get((kind, space, name))
        metadata = body["metadata"]
        if before is None and kind in (MODEL_SERVE, MODEL_ADAPTER, MODEL_CACHE):
            body.setdefault("status", {"conditions": [copy.deepcopy(UNOBSERVED.to_json())]})  # the schema's default
        if before is None:
            metadata["uid"] = f"uid-{next(self._numbers)}"
            metadata["generation"] = 1
            made = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(self._numbers))
            metadata["creationTimestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
        else:
            metadata.update({**_server_metadata(before), "resourceVersion": before["metadata"]["resourceVersion"]})
            if body == before:
                return before
            _check_immutable(kind, before, body)
            metadata["generation"] += before.get("spec") != body.get("spec")
        metadata["resourceVersion"] = str(next(self._numbers))
        self.objects[kind, space, name] = body
        self._tell(kind, body, deleted=False)
        held = metadata.get("finalizers") or kind not in (MODEL_ADAPTER, MODEL_CACHE)
        if metadata.get("deletionTimestamp") and not held:
            self.remove(kind, space, name)
        return body

    def _tell(self, kind: ResourceKind, body: Body, *, deleted: bool) -> None:
        if self.listener is not None and (not kind.owned or _ours(body)):
            self.listener(kind, copy.deepcopy(body), deleted)


def _nobody_there(name: str, path: str, *_: object) -> Body:
    raise WorkerUnreachableError(f"{name}{path}")


async def _call(between: Between | None, request: Request) -> None:
    if between is not None and (waiting := between(request)) is not None:
        await waiting


def _apply_over(live: Any, document: Any, *, dropped: Any) -> Any:
    """Server-side apply by one manager among others: its values win, what it no longer sets goes, the rest stays."""
    if isinstance(live, Mapping) and isinstance(document, Mapping):
        before = dropped if isinstance(dropped, Mapping) else {}
        kept = {key: value for key, value in live.items() if key in document or key not in before}
        return kept | {
            key: _apply_over(live.get(key), value, dropped=before.get(key)) for key, value in document.items()
        }
    named = [each for part in (live, document) if isinstance(part, list) for each in part]
    if (
        isinstance(live, list)
        and isinstance(document, list)
        and all(isinstance(e, Mapping) and "name" in e for e in named)
    ):
        merge_key = "mountPath" if all("mountPath" in each for each in named) else "name"  # as the API's schema has it
        before = {each[merge_key]: each for each in dropped or ()}
        have, want = ({each[merge_key]: each for each in part} for part in (live, document))
        kept = [name for name in have if name in want or name not in before]
        merged = {
            name: _apply_over(have.get(name), want.get(name, have.get(name)), dropped=before.get(name))
            for name in (*kept, *want)
        }
        return list(merged.values())
    return document


def _check_immutable(kind: ResourceKind, before: Body, body: Body) -> None:
    """What the API server's validation refuses to change."""
    fixed = kind is CONTROLLER_REVISION or (kind is CONFIG_MAP and before.get("immutable"))
    if fixed and body.get("data") != before.get("data"):
        raise KubeError(422, f"{kind.kind} {body['metadata']['name']} is invalid: data: field is immutable")


def _ours(body: Body) -> bool:
    return labels.label_of(body, labels.MANAGED_BY) == labels.FIELD_MANAGER


def _active(pod: Body) -> bool:
    """Whether its controller counts it: one that is being deleted, or has ended as a whole, is replaced."""
    ended = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return "deletionTimestamp" not in pod["metadata"] and not ended


def _ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _stays_longer(pod: Body) -> tuple[bool, int]:
    """Of two pods the one that is not ready goes first, then the one of lower cost."""
    return _ready(pod), int((pod["metadata"].get("annotations") or {}).get(labels.DELETION_COST, "0"))


def _owner_uid(body: Body) -> str | None:
    return next((reference["uid"] for reference in body["metadata"].get("ownerReferences") or ()), None)


def _server_metadata(body: Body) -> Body:
    fields = ("uid", "generation", "creationTimestamp", "resourceVersion")
    return {field: body["metadata"][field] for field in fields}


class World:
    """A cluster with an operator in it that reacts to every event until nothing is left to do."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.cluster.clock = lambda: self.now
        self.settings = Settings(worker_image="worker:test")
        self.pending: set[Key] = set()
        self.adapters_pending: set[Key] = set()  # ModelServes whose adapters are to be reconciled
        self.adapters_due: dict[Key, datetime] = {}
        self.caches_pending: set[Key] = set()
        self.caches_due: dict[Key, datetime] = {}
        self.events_wait = False  # whether events come once a reconcile has ended: those of its own writes are echoes
        self.waiting_events: list[tuple[ResourceKind, Body, bool]] = []
        self.reconciled: list[Key] = []
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.after_each: Callable[[], None] = lambda: None  # of a reconcile, and what controllers did then
        self.due: dict[Key, datetime] = {}  # when the last reconcile of a key asked to be called again
        self.restart_operator()

    def restart_operator(self) -> None:
        """A new operator process: it knows nothing but what it lists."""
        store = Store()
        shared = SharedConfig(self.settings.namespace)
        self.gatherer = Gatherer(self.cluster, store, shared, clock=lambda: self.now)
        self.reconciler = Reconciler(
            self.gatherer, Applier(self.cluster, store, clock=lambda: self.now), shared, self.settings
        )
        self.cluster.listener = self._heard
        self.gatherer.reports.told = lambda key: self.pending.add(key)
        keys = ManagementKeys(self.cluster, namespace="modelserve-system", name="management")
        self.adapter_gatherer = AdapterGatherer(
            self.cluster, store, keys, absent=self.gatherer.absent, clock=lambda: self.now
        )
        self.gatherer.gone = self.adapter_gatherer.forget
        applier = Applier(self.cluster, store, clock=lambda: self.now)
        self.adapter_reconciler = AdapterReconciler(self.adapter_gatherer, applier, self.settings.allowed)
        self.cache_gatherer = CacheGatherer(self.cluster, store, clock=lambda: self.now)
        self.cache_reconciler = CacheReconciler(
            self.cache_gatherer, applier, self.settings, tell=lambda key: self.pending.add(key)
        )
        asyncio.run(self.gatherer.relist())
        self.caches_pending = set(self.cache_gatherer.known_keys())
        self.pending = self.gatherer.known_keys()
        self.adapters_pending = set(self.adapter_gatherer.targets())

    def _heard(self, kind: ResourceKind, body: Body, deleted: bool) -> None:
        if self.events_wait:
            self.waiting_events.append((kind, body, deleted))
        elif kind in (*WATCHED, *OPTIONAL):
            heard = self.gatherer.hear(kind, body, deleted=deleted)
            self.pending |= heard.keys | (self.gatherer.concerned() if heard.supply else set())
            self.adapters_pending |= self.adapter_gatherer.concerned(heard)
            self.caches_pending |= self.cache_gatherer.concerned(heard)

    def settle(self) -> None:
        """Reconcile and run the controllers until both rest."""

        async def work() -> None:
            for _ in range(60):
                waiting, self.waiting_events = self.waiting_events, []
                self.events_wait, before = False, self.events_wait
                for event in waiting:
                    self._heard(*event)
                self.events_wait = before
                if not self.pending and self.caches_pending:
                    await self._reconcile_caches()
                    continue
                if not self.pending and self.adapters_pending:
                    await self._reconcile_adapters()
                    continue
                if not self.pending:
                    return
                key = min(self.pending)
                self.pending.discard(key)
                self.reconciled.append(key)
                delay = await self.reconciler.reconcile(key)
                self.due[key] = (
                    self.now + timedelta(seconds=delay) if delay is not None else datetime.max.replace(tzinfo=UTC)
                )
                self.cluster.run_controllers()
                self.after_each()
                for _ in range(5):  # what workers are asked beside it
                    await asyncio.sleep(0)
            raise AssertionError(f"the operator does not come to rest: {self.cluster.writes[-10:]}")

        asyncio.run(work())

    async def _reconcile_caches(self) -> None:
        key = min(self.caches_pending)
        self.caches_pending.discard(key)
        delay = await self.cache_reconciler.reconcile(key)
        self.caches_due.pop(key, None)
        if delay == 0.0:
            self.caches_pending.add(key)
        elif delay is not None:
            self.caches_due[key] = self.now + timedelta(seconds=delay)
        self.cluster.run_controllers()
        self.after_each()

    async def _reconcile_adapters(self) -> None:
        key = min(self.adapters_pending)
        self.adapters_pending.discard(key)
        delay = await self.adapter_reconciler.reconcile(key)
        self.adapters_due.pop(key, None)
        if delay == 0.0:
            self.adapters_pending.add(key)
        elif delay is not None:
            self.adapters_due[key] = self.now + timedelta(seconds=delay)

    def pass_time(self, seconds: float) -> None:
        """The clock moves on, and what asked to be looked at again by then is."""
        self.now += timedelta(seconds=seconds)
        self.adapters_pending |= {key for key, due in self.adapters_due.items() if due <= self.now}
        self.caches_pending |= {key for key, due in self.caches_due.items() if due <= self.now}
        self.pending |= {key for key, due in self.due.items() if due <= self.now}
        self.settle()

    # --- shorthands for tests -------------------------------------------------------------------------------------

    def create(self, spec: Mapping[str, Any], *, name: str = "tiny", **metadata: Any) -> None:
        body = {
            "apiVersion": "serving.modelserve.dev/v1alpha1",
            "kind": "ModelServe",
            "metadata": {"name": name, "namespace": "ml", **metadata},
            "spec": dict(spec),
        }
        self.cluster.put(MODEL_SERVE, body)
        self.settle()

    def edit(self, name: str = "tiny", **fields: Any) -> None:
        """Change top-level fields of the spec, as kubectl edit would; None removes one."""

        def change(body: Body) -> None:
            body["spec"] = {key: value for key, value in {**body["spec"], **fields}.items() if value is not None}

        self.cluster.change(MODEL_SERVE, name, change)
        self.settle()

    def ask_for_a_retry(self, value: str, name: str = "tiny") -> None:
        """As kubectl annotate --overwrite would."""
        self.cluster.change(MODEL_SERVE, name, lambda body: body["metadata"].update(annotations={labels.RETRY: value}))
        self.settle()

    def status(self, name: str = "tiny") -> Body:
        status: Body = self.cluster.objects[MODEL_SERVE, "ml", name]["status"]
        return status

    def shown_plan(self, name: str = "tiny") -> Body:
        """status.plan without candidates that were not chosen: they are those of a plan made now."""
        plan = self.status(name)["plan"]
        return {**plan, "candidates": [each for each in plan["candidates"] if each["verdict"] == "Chosen"]}

    def condition(self, kind: str, name: str = "tiny") -> tuple[str, str] | None:
        found = {c["type"]: (c["status"], c["reason"]) for c in self.status(name)["conditions"]}
        return found.get(kind)

    def message(self, kind: str, name: str = "tiny") -> str:
        return str(next(c["message"] for c in self.status(name)["conditions"] if c["type"] == kind))

    def deployments(self) -> dict[str, int]:
        """Replicas by plan hash."""
        return {
            str(labels.label_of(body, labels.PLAN_HASH)): body["spec"]["replicas"]
            for body in self.cluster.of(DEPLOYMENT)
        }

    def deployment(self, plan_hash: str) -> Body:
        return next(
            body for body in self.cluster.of(DEPLOYMENT) if labels.label_of(body, labels.PLAN_HASH) == plan_hash
        )

    def deployment_of(self, name: str) -> Body:
        """The only Deployment of a ModelServe."""
        (found,) = [body for body in self.cluster.of(DEPLOYMENT) if labels.label_of(body, labels.NAME) == name]
        return found

    def revision(self, name: str = "tiny") -> str:
        """Hash of the revision that is committed."""
        return str(self.status(name)["revision"]).removeprefix(f"{name}-")

    def served_hash(self, name: str = "tiny") -> str:
        service = self.cluster.objects[SERVICE, "ml", name]
        return str(service["spec"]["selector"][labels.PLAN_HASH])

    def make_ready(self) -> None:
        for deployment in self.cluster.of(DEPLOYMENT):
            self.cluster.make_ready(deployment)
        self.settle()

    def add_node(self, name: str, *, product: str, memory_mib: int, gpus: int) -> None:
        node_labels = {
            "kubernetes.io/hostname": name,
            "nvidia.com/gpu.product": product,
            "nvidia.com/gpu.memory": str(memory_mib),
            "nvidia.com/gpu.count": str(gpus),
        }
        body = {
            "metadata": {"name": name, "labels": node_labels},
            "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
        }
        self.cluster.put(NODE, body)
        self.settle()

    def serve(self, *kinds: ResourceKind) -> None:
        """The cluster has these kinds, and an operator starts that finds them."""
        for kind in kinds:
            del self.cluster.refused_kinds[kind]
        self.restart_operator()
        self.settle()

    def rest(self) -> list[tuple[str, str, str]]:
        """Forget the writes so far; returns them."""
        done, self.cluster.writes = self.cluster.writes, []
        return done


@pytest.fixture
def world() -> World:
    made = World()
    modes = ["ReadOnlyMany"]
    made.cluster.put(
        CLAIM, {"metadata": {"name": "weights", "namespace": "ml"}, "spec": {"accessModes": modes}, "status": {}}
    )
    return made


TINY_SPEC = {
    "model": {"uri": "pvc://weights/tiny"},
    "context": {"maxModelLen": 2048},
    "accelerators": {"products": ["CPU"]},
    "pod": {"resources": {"requests": {"cpu": "0.5"}, "limits": {"memory": "3Gi"}}},
}


@pytest.fixture
def tiny_spec() -> dict[str, Any]:
    return copy.deepcopy(TINY_SPEC)


@pytest.fixture
def tiny_facts() -> ModelFacts:
    architecture = ModelArchitecture(
        num_hidden_layers=6,
        full_attention_layers=(2, 5),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        sliding_window=64,
        max_position_embeddings=4096,
        vocab_size=512,
    )
    return ModelFacts(architecture=architecture, weight_bytes=1_000_000, format=BFLOAT16)


@pytest.fixture
def ready_world(world: World, tiny_spec: dict[str, Any], tiny_facts: ModelFacts) -> World:
    """`tiny` is inspected, planned and Ready on the CPU."""
    world.create(tiny_spec)
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    assert world.condition("Ready") == ("True", "RolledOut")
    return world
