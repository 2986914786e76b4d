"""Reads what bears on one ModelCache, the progress of its Job included. I/O, but no writes to the cluster."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from modelserve.caches.model_cache import ModelCacheSpec
from modelserve.caches.reports import PROGRESS_PATH, CacheProgress
from modelserve.errors import InvalidInput
from modelserve_operator import labels, sources
from modelserve_operator.caches.snapshot import FILL, Body, CacheJob, CacheSnapshot, end_of
from modelserve_operator.cluster.kinds import (
    CLAIM,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    MODEL_CACHE,
    MODEL_SERVE,
    POD,
)
from modelserve_operator.cluster.kube import Kube, WorkerUnreachableError
from modelserve_operator.cluster.store import Store, key_of
from modelserve_operator.gathering.heard import Heard
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.process.work_queue import Key

Used = tuple[frozenset[str], frozenset[str]]  # names of ModelServes, commits
NOBODY: Used = (frozenset(), frozenset())


class CacheGatherer:
    """Claims are read at each look: they are not watched, and caches are few."""

    def __init__(self, kube: Kube, store: Store, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._kube, self._store, self._clock = kube, store, clock
        self._used: tuple[tuple[int, ...], dict[Key, Used]] | None = None  # with the changes it was made after
        self._jobs: tuple[tuple[int, ...], dict[Key, list[Body]]] | None = None

    def known_keys(self) -> frozenset[Key]:
        """Every ModelCache."""
        return frozenset(Key(*key_of(body)) for body in self._store.all(MODEL_CACHE))

    def counts(self) -> tuple[int, int]:
        """How many there are, and how many of them are filled."""
        bodies = tuple(self._store.all(MODEL_CACHE))
        return len(bodies), sum(sources.filled_status(body) is not None for body in bodies)

    def concerned(self, heard: Heard) -> frozenset[Key]:
        """ModelCaches that what was heard may concern: those of ModelServes of which something changed, since they may
        be used by others now."""
        if not heard.keys:
            return heard.caches
        before = self._used[1] if self._used is not None else {}
        names = heard.keys
        found = {key for known in (before, self._uses()) for key, (users, _) in known.items()
                 if any(Key(key.namespace, user) in names for user in users)}  # fmt: skip
        return heard.caches | frozenset(found)

    async def observe(self, key: Key) -> CacheSnapshot | None:
        """Everything that bears on one ModelCache; None when it is gone. Raises KubeError."""
        body = self._store.get(MODEL_CACHE, *key)
        if body is None:
            return None
        spec, fault = _spec(body)
        claim = None
        if spec is not None:
            name = sources.cache_claim(key.name, spec.storage)
            claim = await self._kube.get(CLAIM, namespace=key.namespace, name=name)
        of_all = self._jobs_of_all()
        own = [each for each in of_all.get(key, ()) if _owned(each, body)]
        running = [CacheJob(each) for others, jobs in of_all.items() for each in jobs if others != key]
        users, used = self._uses().get(key, NOBODY)
        return CacheSnapshot(
            key=key,
            body=body,
            spec=spec,
            fault=fault,
            jobs=tuple(await asyncio.gather(*map(self._job, own))),
            claim=claim,
            users=tuple(sorted(users)),
            used=used,
            others=sum(job.task == FILL and not job.ended for job in running),
            now=self._clock(),
        )

    async def _job(self, body: Body) -> CacheJob:
        uid, namespace = body["metadata"]["uid"], body["metadata"]["namespace"]
        pods = [each for each in self._store.all(POD) if _of_job(each, uid, namespace)]
        job = CacheJob(body, tuple(map(Pod.from_body, pods)), end_of(pods))
        running = next((each for each in pods if (each.get("status") or {}).get("phase") == "Running"), None)
        if job.ended or job.task != FILL or running is None or not running["status"].get("podIP"):
            return job
        try:
            told = CacheProgress.model_validate(await self._kube.read_worker(running, PROGRESS_PATH))
        except (WorkerUnreachableError, ValidationError):
            return job
        return replace(job, progress=told)

    def _jobs_of_all(self) -> dict[Key, list[Body]]:
        changes = self._store.changes(JOB)
        if self._jobs is None or self._jobs[0] != changes:
            found: dict[Key, list[Body]] = defaultdict(list)
            for body in self._store.all(JOB):
                if name := labels.label_of(body, labels.CACHE):
                    found[Key(body["metadata"]["namespace"], name)].append(body)
            self._jobs = changes, dict(found)
        return self._jobs[1]

    def _uses(self) -> dict[Key, Used]:
        """By ModelCache, who names it or has pods that read it, and the commits of kept revisions."""
        changes = self._store.changes(MODEL_SERVE, CONTROLLER_REVISION, DEPLOYMENT)
        if self._used is not None and self._used[0] == changes:
            return self._used[1]
        users: dict[Key, set[str]] = defaultdict(set)
        commits: dict[Key, set[str]] = defaultdict(set)
        for body in self._store.all(MODEL_SERVE):
            namespace, name = key_of(body)
            if (cache := sources.cache_named(body)) is not None:
                users[Key(namespace, cache)].add(name)
        for body in self._store.all(CONTROLLER_REVISION):
            namespace, name = key_of(body)
            reads = _reads(body)
            owner = labels.label_of(body, labels.NAME)
            if reads is None or owner is None:
                continue
            key = Key(namespace, reads[0])
            commits[key].add(reads[1])
            if self._store.get(DEPLOYMENT, namespace, name) is not None:
                users[key].add(owner)
        found = {key: (frozenset(users[key]), frozenset(commits[key])) for key in {*users, *commits}}
        self._used = changes, found
        return found


def _reads(revision: Body) -> tuple[str, str] | None:
    """(ModelCache, commit) that pods of a ControllerRevision read; None for none of either."""
    data = revision.get("data")
    inputs = data.get("inputs") if isinstance(data, Mapping) else None
    spec: Any = inputs.get("spec") if isinstance(inputs, Mapping) else None
    cache = sources.cache_named({"spec": spec})
    commit = spec["model"].get("revision") if cache is not None else None
    return (cache, commit) if cache is not None and isinstance(commit, str) else None


def _spec(body: Body) -> tuple[ModelCacheSpec | None, str]:
    try:
        return ModelCacheSpec.parse(body.get("spec"))[0], ""
    except InvalidInput as error:
        return None, str(error)


def _owned(job: Body, cache: Body) -> bool:
    return any(each.get("uid") == cache["metadata"]["uid"] for each in job["metadata"].get("ownerReferences") or ())


def _of_job(pod: Body, uid: str, namespace: str) -> bool:
    metadata = pod["metadata"]
    return metadata.get("namespace") == namespace and any(
        each.get("uid") == uid for each in metadata.get("ownerReferences") or ()
    )
