"""The only reader: the store, the nodes, claims and workers, brought together as one Observed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from modelserve_operator import labels, sources
from modelserve_operator.cluster.kinds import (
    CAPACITY_BUFFER,
    CAPACITY_BUFFER_ALPHA,
    CHILDREN,
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    ENDPOINT_SLICE,
    HTTP_ROUTE,
    INFERENCE_POOL,
    JOB,
    LEASE,
    MODEL_CACHE,
    MODEL_SERVE,
    NEWER,
    NODE,
    NODE_POOL,
    OPTIONAL,
    POD,
    POD_TEMPLATE,
    RESOURCE_SLICE,
    SERVICE,
    WATCHED,
    ResourceKind,
)
from modelserve_operator.cluster.kube import Kube, KubeError
from modelserve_operator.cluster.store import ObjectKey, Store, key_of, version_of
from modelserve_operator.gathering.causes import Causes
from modelserve_operator.gathering.claims import ClaimModes
from modelserve_operator.gathering.heard import NOTHING, Heard, heard_of, readers_of
from modelserve_operator.gathering.pending_pods import PendingPods
from modelserve_operator.inventory.pools import WELL_KNOWN, Inventory, PassingTaints
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.learning.worker_reports import WorkerReports
from modelserve_operator.observed.inspection import overdue
from modelserve_operator.observed.pod_health import hangs
from modelserve_operator.observed.snapshot import Observed, Pod, ready_endpoints
from modelserve_operator.process.work_queue import Key
from modelserve_operator.revisions.history import owned_by, read_history, stray_config_maps
from modelserve_operator.revisions.imported import with_imported
from modelserve_operator.rollout.fleet import Member, members

logger = logging.getLogger(__name__)
Body = Mapping[str, Any]


class Gatherer:
    """Hears events, answers `observe`. Nothing here writes to the cluster."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        shared: SharedConfig,
        *,
        namespaces: tuple[str, ...] = (),
        watched: tuple[ResourceKind, ...] = WATCHED,
        optional: tuple[ResourceKind, ...] = OPTIONAL,
        passing: PassingTaints = WELL_KNOWN,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._clock = clock
        self._store = store
        self._shared = shared
        self._namespaces = namespaces
        self.watched = watched
        self.optional = optional
        self._inventory = Inventory(passing)
        self.absent: set[ResourceKind] = set(optional)  # optional kinds that the last LIST did not find
        self.reports = WorkerReports(kube, clock)
        self._claims = ClaimModes(kube, clock)
        self._causes = Causes(kube, clock)
        self.pending_pods = PendingPods(kube, self._inventory, clock, known=self._workers_of, namespaces=namespaces)
        self._fleet: tuple[tuple[int, ...], dict[Key, Member]] | None = None  # with the changes that it was made after
        self._supply = Supply()
        self._supply_changed = True
        self.gone: Callable[[str], None] = _nobody  # called with the uid of a pod that is
        self.heard_version: dict[ResourceKind, int] = {}  # newest resourceVersion that a watch event brought
        self.heard_events: Counter[ResourceKind] = Counter()  # watch events so far
        self._listed = NOTHING  # what LISTs have shown since the last pass that went through
        self._heard_since: set[tuple[ResourceKind, ObjectKey]] = set()  # the last LIST was asked for

    async def relist(self) -> tuple[Heard, dict[ResourceKind, int]]:
        """LIST everything into the store. Returns what differed, and the newest version of each watched kind.

        Called before the first reconcile, so that no decision is made on half a picture, and by the watchdog. An answer
        is older than the events that were heard while it was under way: of their objects it says nothing. A kind that
        the API server refuses to list keeps no other from it but ModelServes, which are not known without children;
        what the others showed is returned by the next call. Raises the first KubeError.
        """
        newest: dict[ResourceKind, int] = {}
        failed: KubeError | None = None
        for kind in (*self.watched, *self.optional):
            if kind in NEWER and NEWER[kind] not in self.absent:
                self.absent.add(kind)
                continue
            if kind is MODEL_SERVE and failed is not None:
                continue
            try:
                version = await self._relist(kind)
            except KubeError as error:
                if not error.status:  # nobody answers, and nobody would of the next kind
                    raise
                failed = failed or error
                continue
            if kind not in self.optional:  # those are watched only where they existed when the operator started
                newest[kind] = version
        if failed is not None:
            raise failed
        shared, _ = await self.pulse()
        self._supply_changed = True
        listed, self._listed = self._listed | shared, NOTHING
        return listed, newest

    async def _relist(self, kind: ResourceKind) -> int:
        """LIST one kind, and note what differs; objects are gone only where the whole answer came. Its newest version.
        Raises KubeError."""
        self._heard_since.clear()
        missing: dict[str, Body] = {self._identity(kind, body): body for body in self._known(kind)}
        version = 0

        def note(body: Body, *, deleted: bool) -> None:
            if (kind, key_of(body)) not in self._heard_since:
                self._listed |= self.note(kind, body, deleted=deleted)

        async for body in self._list(kind):
            version = max(version, version_of(body))
            missing.pop(self._identity(kind, body), None)
            note(body, deleted=False)
        for lost in missing.values():
            note(lost, deleted=True)
        return version

    async def pulse(self) -> tuple[Heard, dict[ResourceKind, int]]:
        """Read the operator's own ConfigMaps: little, and the API server has answered. As `relist`."""
        changed = [self._shared.note(name, await self._shared_config_map(name)) for name in self._shared.names]
        return Heard(supply=any(changed)), {}

    @staticmethod
    def _identity(kind: ResourceKind, body: Body) -> str:
        """What tells a listed object from a namesake; of nodes and slices only the names are known."""
        return str(body["metadata"]["name" if kind in (NODE, RESOURCE_SLICE) else "uid"])

    def _known(self, kind: ResourceKind) -> Iterable[Body]:
        if kind is NODE:
            return [{"metadata": {"name": name}} for name in self._inventory.names()]
        if kind is RESOURCE_SLICE:
            return [{"metadata": {"name": name}} for name in self._inventory.slices()]
        return self._store.all(kind)

    async def _list(self, kind: ResourceKind) -> AsyncIterator[dict[str, Any]]:
        """All objects of a kind in the watched namespaces; of an optional kind that cannot be listed, none."""
        try:
            for namespace in (self._namespaces if kind.namespaced else ()) or (None,):
                async for page in self._kube.pages(kind, namespace=namespace):
                    for body in page:
                        yield body
        except KubeError as error:
            if kind not in self.optional or error.status not in (403, 404):
                raise
            if kind not in self.absent:
                logger.warning("%s can no longer be listed: %s", kind.plural, error)
            self.absent.add(kind)
        else:
            self.absent.discard(kind)

    def known_keys(self) -> set[Key]:
        """Every ModelServe that is known."""
        return {self._key(body) for body in self._store.all(MODEL_SERVE)}

    def concerned(self) -> set[Key]:
        """ModelServes whose plan a change of the supply may concern: all but those that allow only the CPU.

        From now on they see it: in a crowd of changes a supply of thousands of nodes is put together once.
        """
        self._supply_changed = True
        return {self._key(body) for body in self._store.all(MODEL_SERVE) if not sources.cpu_only(body)}

    def hear(self, kind: ResourceKind, body: Body, *, deleted: bool) -> Heard:
        """Note one watch event. Returns what it may concern; nothing for a heartbeat or an echo."""
        self.heard_version[kind] = max(self.heard_version.get(kind, 0), version_of(body))
        self.heard_events[kind] += 1
        self._heard_since.add((kind, key_of(body)))
        return self.note(kind, body, deleted=deleted)

    def note(self, kind: ResourceKind, body: Body, *, deleted: bool) -> Heard:
        """Keep one object's state. Returns what it may concern."""
        if kind is NODE:  # of nodes only their places are kept
            name = body["metadata"]["name"]
            left = name in self._inventory.leaving
            supply = self._inventory.hear(body, deleted=deleted)
            moved = left != (name in self._inventory.leaving)
            return Heard(frozenset(self._on_node(name)) if moved else frozenset(), supply=supply)
        if kind is RESOURCE_SLICE:  # of slices only what they say of their nodes
            return Heard(supply=self._inventory.hear_slice(body, deleted=deleted))
        if kind is NODE_POOL:  # its status tells what runs; a plan depends on what may
            before = self._store.get(kind, "", body["metadata"]["name"])
            kept = not deleted and self._store.put(kind, body)
            if deleted:
                self._store.remove(kind, body)
            unchanged = before is not None and kept and before.get("spec") == body.get("spec")
            return Heard(supply=True) if (deleted or kept) and not unchanged else NOTHING
        if self._shared.concerns(kind, body):
            changed = self._shared.note(body["metadata"]["name"], None if deleted else body)
            return Heard(supply=True) if changed else NOTHING
        if deleted:
            self._store.remove(kind, body)
            if kind is POD:
                self.reports.forget(body["metadata"]["uid"])
                self.gone(body["metadata"]["uid"])
        elif not self._store.put(kind, body):
            return NOTHING
        heard = heard_of(kind, body)
        return heard | readers_of(heard.caches, self._store.all(MODEL_SERVE)) if kind is MODEL_CACHE else heard

    async def observe(self, key: Key) -> Observed | None:
        """Everything that bears on one ModelServe; None when it is gone. Raises KubeError."""
        body = self._store.get(MODEL_SERVE, key.namespace, key.name)
        if body is None:
            return None
        uid = body["metadata"]["uid"]
        children = {
            kind: tuple(
                child
                for child in self._store.children(kind, namespace=key.namespace, owner=key.name)
                # Pods and slices belong to children of ours; orphans of an earlier namesake are adopted.
                if kind in (POD, ENDPOINT_SLICE) or owned_by(child, uid) or _orphan_of(child, key.name)
            )
            for kind in CHILDREN
        }
        labelled = {
            kind: self._store.children(kind, namespace=key.namespace, owner=key.name)
            for kind in (CONTROLLER_REVISION, CONFIG_MAP)
        }
        running = {labels.label_of(each, labels.PLAN_HASH) or "": each for each in children[DEPLOYMENT]}
        stored = read_history(body, labelled[CONTROLLER_REVISION], running)
        history = with_imported(stored, body, labelled[CONFIG_MAP], running)
        named = {labels.revision_name(key.name, each.hash) for each in history.revisions}
        stray = {each["metadata"]["uid"] for each in stray_config_maps(children[CONFIG_MAP], named)}
        pods, service = children[POD], next(iter(children[SERVICE]), None)
        now, answers = self._clock(), await self.reports.read(key, pods)
        return Observed(
            model_serve=body,
            deployments=children[DEPLOYMENT],
            controller_revisions=tuple(
                each for each in children[CONTROLLER_REVISION] if each["metadata"]["name"] in named
            ),
            history=history,
            config_maps=tuple(each for each in children[CONFIG_MAP] if each["metadata"]["uid"] not in stray),
            jobs=children[JOB],
            to_move=frozenset(body["metadata"]["uid"] for body in pods if self._has_to_move(body)),
            pods=tuple([await self._with_cause(Pod.from_body(pod), key.namespace, now) for pod in pods]),
            causes=await self._causes_of(children[JOB], pods, now),
            service=service,
            disruption_budget=next(iter(children[DISRUPTION_BUDGET]), None),
            claim_templates=tuple(
                each
                for each in self._store.children(CLAIM_TEMPLATE, namespace=key.namespace, owner=key.name)
                if owned_by(each, uid) or _orphan_of(each, key.name)
            ),
            buffer_kind=self._buffer_kind(),
            capacity_buffer=self._namesake(self._buffer_kind(), body),
            buffer_template=self._namesake(POD_TEMPLATE, body),
            not_served=frozenset(self.absent | (set(OPTIONAL) - set(self.optional))),
            http_route=self._namesake(HTTP_ROUTE, body),
            inference_pool=self._namesake(INFERENCE_POOL, body),
            endpoints=ready_endpoints(children[ENDPOINT_SLICE], service),
            supply=self.supply().seen_from(key.namespace),
            claim_modes={
                name: await self._claims.of(key.namespace, name) for name in sources.claims(body, self._cache_of(body))
            },
            model_cache=self._cache_of(body),
            reports=answers.reports,
            silent=answers.silent,
            ask_again=answers.again,
            now=now,
        )

    def _cache_of(self, model_serve: Body) -> Body | None:
        """The ModelCache that it names."""
        name = sources.cache_named(model_serve)
        return self._store.get(MODEL_CACHE, key_of(model_serve)[0], name) if name is not None else None

    def _buffer_kind(self) -> ResourceKind | None:
        """CapacityBuffer in the newest version that is served here; None where it, or its template, is out of reach."""
        there = set(self.optional) - self.absent
        served = (each for each in (CAPACITY_BUFFER, CAPACITY_BUFFER_ALPHA) if each in there)
        return next(served, None) if POD_TEMPLATE in there else None

    def _namesake(self, kind: ResourceKind | None, model_serve: Body) -> Body | None:
        """The object of the ModelServe's name, where that is its own, or was of an earlier namesake."""
        namespace, name = key_of(model_serve)
        found = self._store.get(kind, namespace, name) if kind is not None else None
        if found is None or not (owned_by(found, model_serve["metadata"]["uid"]) or _orphan_of(found, name)):
            return None
        return found

    async def _with_cause(self, pod: Pod, namespace: str, now: datetime) -> Pod:
        """The pod, and what Kubernetes says where it hangs before any container of it has begun."""
        if not pod.making or not hangs(pod, now):
            return pod
        return replace(pod, trouble=await self._causes.of(namespace, pod.uid))

    async def _causes_of(self, jobs: Iterable[Body], pods: Iterable[Body], now: datetime) -> dict[str, str]:
        """Why Jobs have no pods, by uid."""
        owners = {Pod.from_body(pod).owner for pod in pods}
        without = [job["metadata"] for job in jobs if job["metadata"]["uid"] not in owners and overdue(job, now)]
        found = {each["uid"]: await self._causes.of(each["namespace"], each["uid"]) for each in without}
        return {uid: words for uid, words in found.items() if words is not None}

    def supply(self) -> Supply:
        """What plans are made from, as of the last `concerned`; the same object until something in it changes."""
        shared, known = self._shared, self._supply
        if not self._supply_changed and known.catalogue is shared.catalogue and known.learned is shared.learned:
            return known
        self._supply_changed = False
        found = Supply(
            pools=self._inventory.pools(),
            nodes_of=self._inventory.nodes_of(),
            hosts=self._inventory.hosts(),
            idle=self._inventory.idle(),
            node_pools=tuple(sorted(self._store.all(NODE_POOL), key=key_of)),
            catalogue=self._shared.catalogue,
            learned=self._shared.learned,
        )
        if found != self._supply:
            self._supply = found.succeeding(self._supply)
        return self._supply

    async def _shared_config_map(self, name: str) -> Body | None:
        """One of the operator's own ConfigMaps; a namespace that it may not read, or that is not there, has none."""
        try:
            return await self._kube.get(CONFIG_MAP, namespace=self._shared.namespace, name=name)
        except KubeError as error:
            if error.status != 403:
                raise
            logger.warning("ConfigMap %s/%s cannot be read: %s", self._shared.namespace, name, error)
            return None

    def _workers_of(self, key: Key) -> tuple[Body | None, tuple[Body, ...]]:
        pods = self._store.children(POD, namespace=key.namespace, owner=key.name)
        return self._store.get(MODEL_SERVE, key.namespace, key.name), pods

    async def lease(self, name: str) -> Body | None:
        """One of the operator's own namespace. Raises KubeError."""
        return await self._kube.get(LEASE, namespace=self._shared.namespace, name=name)

    def fleet(self) -> dict[Key, Member]:
        """Every ModelServe by the worker of its last revision. It is put together once for all that ask meanwhile."""
        changes = self._store.changes(MODEL_SERVE, CONTROLLER_REVISION)
        if self._fleet is None or self._fleet[0] != changes:
            self._fleet = changes, members(self._store.all(MODEL_SERVE), self._store.all(CONTROLLER_REVISION))
        return self._fleet[1]

    def _has_to_move(self, pod: Body) -> bool:
        return (pod.get("spec") or {}).get("nodeName") in self._inventory.leaving

    def _on_node(self, name: str) -> Iterator[Key]:
        """ModelServes with workers on a node."""
        for body in self._store.all(POD):
            owner = labels.label_of(body, labels.NAME)
            if owner and (body.get("spec") or {}).get("nodeName") == name:
                yield Key(body["metadata"]["namespace"], owner)

    @staticmethod
    def _key(body: Body) -> Key:
        return Key(body["metadata"]["namespace"], body["metadata"]["name"])


def _nobody(_: str) -> None:
    """Until somebody listens."""


def _orphan_of(body: Body, name: str) -> bool:
    """Whether a ModelServe of this name left it without an owner, and not somebody a copy of it under another name."""
    plan_hash = labels.label_of(body, labels.PLAN_HASH)
    facts = labels.label_of(body, labels.COMPONENT) in (labels.MODEL_FACTS, labels.COMMIT, labels.INSPECTION)
    own = body["metadata"]["name"]
    named = own == (name if plan_hash is None else labels.revision_name(name, plan_hash))
    return labels.orphaned(body) and (own.startswith(f"{name}-") if facts else named)
