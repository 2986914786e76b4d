"""Reads what bears on the ModelAdapters of one ModelServe, its workers included. I/O, but no writes to the cluster."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from modelserve.api import ModelServe, ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve_operator import labels
from modelserve_operator.adapters.decision import digest_of
from modelserve_operator.adapters.reasons import AdapterReason
from modelserve_operator.adapters.snapshot import (
    Adapter,
    AdapterSnapshot,
    AdapterWorker,
    Problem,
    loaded_of,
    names_versions,
)
from modelserve_operator.cluster.kinds import (
    CONFIG_MAP,
    MODEL_ADAPTER,
    MODEL_REWRITE,
    MODEL_SERVE,
    POD,
    REFERENCE_GRANT,
    SECRET,
    ResourceKind,
)
from modelserve_operator.cluster.kube import Kube, KubeError, WorkerRefusedError, WorkerUnreachableError
from modelserve_operator.cluster.store import Store, key_of
from modelserve_operator.gathering.heard import Heard, target_of
from modelserve_operator.gathering.management_key import ManagementKeys
from modelserve_operator.observed.snapshot import WORKER_CONTAINER, Pod
from modelserve_operator.process.work_queue import Key
from modelserve_operator.revisions.history import owned_by

Body = Mapping[str, Any]
PATH = "/v1/adapters"
AT_ONCE = 64  # workers that are being asked


class AdapterGatherer:
    """`absent`: optional kinds that the cluster does not have, as the Gatherer finds them."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        keys: ManagementKeys,
        *,
        absent: set[ResourceKind],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube, self._store, self._keys, self._absent, self._clock = kube, store, keys, absent, clock
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._targets: tuple[tuple[int, ...], dict[Key, list[Body]]] | None = None  # with the changes it was made after
        self._took: dict[tuple[str, int], str] = {}  # run of a pod: uid, restarts -> digest of the set it took last
        self._refused: dict[tuple[str, int], tuple[str, Problem]] = {}  # likewise, and what it said of it

    def targets(self) -> dict[Key, list[Body]]:
        """ModelAdapters by the ModelServe that they refer to, which need not exist."""
        changes = self._store.changes(MODEL_ADAPTER)
        if self._targets is None or self._targets[0] != changes:
            found: dict[Key, list[Body]] = defaultdict(list)
            for body in self._store.all(MODEL_ADAPTER):
                if (target := target_of(body)) is not None:
                    found[target].append(body)
            self._targets = changes, dict(found)
        return self._targets[1]

    def model_serves(self) -> frozenset[Key]:
        """Every ModelServe that adapters refer to, or that has room for some."""
        served = (Key(*key_of(body)) for body in self._store.all(MODEL_SERVE))
        return frozenset(self.targets()) | frozenset(filter(self._has_room, served))

    def concerned(self, heard: Heard) -> frozenset[Key]:
        """ModelServes whose adapters what was heard may concern."""
        referred = self.targets()
        named = frozenset(key for key in heard.keys if key in referred or self._has_room(key))
        granted = frozenset(key for key in referred if key.namespace in heard.granting) if heard.granting else named
        return heard.adapters | named | granted

    def _has_room(self, key: Key) -> bool:
        """As an (unvalidated) spec says."""
        spec = (self._store.get(MODEL_SERVE, *key) or {}).get("spec")
        return isinstance(spec, Mapping) and spec.get("adapters") is not None

    async def observe(self, key: Key) -> AdapterSnapshot:
        """Everything that bears on the adapters of a ModelServe. Raises KubeError."""
        bodies = self.targets().get(key, [])
        model_serve = self._store.get(MODEL_SERVE, *key)
        if model_serve is not None and model_serve["metadata"].get("deletionTimestamp"):
            model_serve = None
        spec = _spec(model_serve) if model_serve is not None else None
        manages = spec is not None and spec.adapters is not None
        worker_key = await self._keys.of(model_serve["metadata"]["uid"]) if model_serve and manages else ""
        pods = self._pods(key) if manages and bodies else []
        return AdapterSnapshot(
            key=key,
            adapters=tuple([await self._adapter(body) for body in bodies]),
            model_serve=model_serve,
            spec=spec,
            workers=tuple(await asyncio.gather(*(self._ask(pod, body, worker_key) for pod, body in pods))),
            grants=tuple(
                each for each in self._store.all(REFERENCE_GRANT) if each["metadata"]["namespace"] == key.namespace
            ),
            grants_served=REFERENCE_GRANT not in self._absent,
            rewrite=self._rewrite(model_serve),
            rewrites_served=MODEL_REWRITE not in self._absent,
            config_map=self._store.get(CONFIG_MAP, key.namespace, labels.adapters_name(key.name)),
            key_digest=self._keys.digest(worker_key) if worker_key else "",
            now=self._clock(),
        )

    def _rewrite(self, model_serve: Body | None) -> Body | None:
        if model_serve is None:
            return None
        namespace, name = key_of(model_serve)
        found = self._store.get(MODEL_REWRITE, namespace, labels.adapters_name(name))
        return found if found is not None and owned_by(found, model_serve["metadata"]["uid"]) else None

    async def give(self, key: Key, worker: AdapterWorker, desired: dict[str, Any], *, uid: str) -> Problem | None:
        """Have a worker take the whole set, unless this run of it has; what it answers where it does not.

        `uid`: of the ModelServe. A set that was refused is given again only once it is another one, or after a restart.
        """
        digest = digest_of(desired)
        found = self._store.children(POD, namespace=key.namespace, owner=key.name)
        body = next((each for each in found if each["metadata"]["uid"] == worker.uid), None)
        if body is None:
            return None
        run = _run(Pod.from_body(body))
        if worker.took == digest and _lists(worker, desired):
            return None
        if run in self._refused and self._refused[run][0] == digest:
            return self._refused[run][1]
        try:
            await self._kube.manage_worker(body, PATH, key=await self._keys.of(uid), body=desired)
        except (WorkerUnreachableError, WorkerRefusedError) as error:
            problem = _problem(error)
            if isinstance(error, WorkerRefusedError) and error.status == 400:
                self._refused[run] = digest, problem
            return problem
        self._took[run] = digest
        self._refused.pop(run, None)
        return None

    def forget(self, uid: str) -> None:
        """A pod is gone."""
        self._took = {run: each for run, each in self._took.items() if run[0] != uid}
        self._refused = {run: each for run, each in self._refused.items() if run[0] != uid}

    def _pods(self, key: Key) -> list[tuple[Pod, Body]]:
        """Workers that can be asked: their process runs, whether or not they take requests yet."""
        bodies = self._store.children(POD, namespace=key.namespace, owner=key.name)
        pods = [(Pod.from_body(body), body) for body in bodies]
        return [
            (pod, body)
            for pod, body in pods
            if pod.plan_hash and not pod.terminating and not pod.ended and (pod.ready or _runs(body))
        ]

    async def _ask(self, pod: Pod, body: Body, key: str) -> AdapterWorker:
        worker = AdapterWorker(pod.name, pod.uid, pod.ready, took=self._took.get(_run(pod)))
        try:
            async with self._at_once:
                answer = await self._kube.manage_worker(body, PATH, key=key)
            loaded = loaded_of(answer)
        except (WorkerUnreachableError, WorkerRefusedError, ValueError) as error:
            return replace(worker, problem=_problem(error))
        known = self._refused.get(_run(pod))
        problem = known[1] if known is not None else None
        return replace(worker, loaded=loaded, problem=problem, names_versions=names_versions(answer))

    async def _adapter(self, body: Body) -> Adapter:
        """With the token of its Secret, which is read each time: it may be another one, and nothing tells."""
        adapter = Adapter.of(body)
        if adapter.spec is None or adapter.spec.secret_ref is None or adapter.leaving:
            return adapter
        named, namespace = adapter.spec.secret_ref, adapter.key.namespace
        where = f"Secret {namespace}/{named.name}"
        try:
            secret = await self._kube.get(SECRET, namespace=namespace, name=named.name)
        except KubeError as error:
            if error.status != 403:
                raise
            fault = f"The operator may not read {where}: the chart's value adapters.secrets allows it."
            return replace(adapter, secret_fault=fault)
        if secret is None:
            return replace(adapter, secret_fault=f"There is no {where}.")
        try:
            token = base64.b64decode((secret.get("data") or {})[named.key], validate=True).decode().strip()
        except (KeyError, binascii.Error, UnicodeDecodeError, TypeError):
            return replace(adapter, secret_fault=f"{where} has no text under the key {named.key}.")
        return replace(adapter, token=token)


def _spec(model_serve: Body) -> ModelServeSpec | None:
    try:
        parsed, _ = ModelServe.parse_of_any_release(model_serve)
    except InvalidInput:
        return None
    return parsed.spec


def _run(pod: Pod) -> tuple[str, int]:
    return pod.uid, pod.restarts


def _runs(body: Body) -> bool:
    """Whether the worker's process runs, and has an address."""
    status = body.get("status") or {}
    containers = status.get("containerStatuses") or ()
    return bool(status.get("podIP")) and any(
        each.get("name") == WORKER_CONTAINER and "running" in (each.get("state") or {}) for each in containers
    )


def _lists(worker: AdapterWorker, desired: dict[str, Any]) -> bool:
    """Whether the worker's answer has every version: a front end that started anew has lost what it took."""
    wanted = {(each["name"], version["id"]) for each in desired["adapters"] for version in each["versions"]}
    told = {(each.name, each.id) for each in worker.loaded or ()}
    return wanted <= told


def _problem(error: Exception) -> Problem:
    if isinstance(error, WorkerRefusedError):
        if error.status in (404, 405):
            message = "it was started without room for adapters; pods made since spec.adapters is set have it"
            return Problem(AdapterReason.WORKERS_WITHOUT, message)
        if error.status == 401:
            message = "it does not know the operator's key; a minute after ConfigMap NAME-adapters is right it does"
            return Problem(AdapterReason.WORKERS_REFUSE, message)
        return Problem(AdapterReason.WORKERS_REFUSE, str(error))
    return Problem(AdapterReason.WORKERS_UNREACHABLE, str(error))
