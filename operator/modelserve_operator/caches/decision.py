"""What to do about one ModelCache: which Job runs, which goes, and what the object says. Pure.

The status is the only memory of what is on the volume; a Job that has ended is deleted once the status has its answer.
One that failed stays until it is tried again, and has the number of tries in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from modelserve.caches.model_cache import MOST_COMMITS, FilledStatus, ModelCacheSpec
from modelserve.caches.reports import FilledCache, UnfilledCache
from modelserve_operator import labels
from modelserve_operator.caches.reasons import CacheReason
from modelserve_operator.caches.snapshot import FILL, FREE, Body, CacheJob, CacheSnapshot
from modelserve_operator.manifests.cache_jobs import JobImage, claim, fill_job, free_job
from modelserve_operator.observed.snapshot import moment
from modelserve_operator.observed.terminal_failure import delay_after
from modelserve_operator.observed.transitions import Finding
from modelserve_operator.sources import cache_claim

FETCHING_SECONDS, WAITING_SECONDS, REST_SECONDS = 3.0, 10.0, 300.0


@dataclass(frozen=True)
class CacheDecision:
    """`filled`: what the status is to say is there. `refused`: why the spec is not acted on. `claim`, `start`: objects
    to make; `discard`: Jobs to delete once the status is written and `start` is there; `drop_claim`: the claim that was
    made for it goes. `hold`, `release`: whether its deletion is to wait for us from now on, or no longer."""

    snapshot: CacheSnapshot
    finding: Finding
    filled: FilledStatus | None = None
    refused: Finding | None = None
    hold: bool = False
    release: bool = False
    claim: dict[str, Any] | None = None
    start: dict[str, Any] | None = None
    discard: tuple[Body, ...] = ()
    drop_claim: bool = False
    again: float = REST_SECONDS


def decide(snapshot: CacheSnapshot, image: JobImage, *, most_fetches: int) -> CacheDecision:
    """From the snapshot alone. `most_fetches`: Jobs of all caches that may fetch at a time."""
    if snapshot.leaving:
        return _leaving(snapshot, image)
    filled = snapshot.filled
    if snapshot.spec is None:
        refused = Finding(False, CacheReason.INVALID_SPEC, snapshot.fault, stalled=True)
        return CacheDecision(snapshot, refused, filled, refused)
    refused_storage = _storage_refused(snapshot, snapshot.spec)
    if refused_storage is not None:
        return CacheDecision(snapshot, refused_storage, filled, refused_storage, again=WAITING_SECONDS)
    made = None
    if snapshot.claim is None and snapshot.spec.storage.volume is not None:
        made = claim(snapshot.body, snapshot.spec.storage.volume)
    return replace(_filling(snapshot, snapshot.spec, image, most_fetches), claim=made, hold=not snapshot.held)


def asked_for(spec: ModelCacheSpec) -> str:
    """Digest of what decides on the files, and on the way to them."""
    wanted = spec.to_json()
    return labels.short_hash([wanted.get(key) for key in ("uri", "revision", "secretRef", "pod")])


def garbage(filled: FilledStatus, used: frozenset[str]) -> frozenset[str]:
    """Commits on the volume that nobody reads any more."""
    return frozenset(filled.held) - {filled.commit} - used


def _storage_refused(snapshot: CacheSnapshot, spec: ModelCacheSpec) -> Finding | None:
    name = cache_claim(snapshot.key.name, spec.storage)
    if spec.storage.volume is None:
        if snapshot.claim is not None:
            return None
        message = f"There is no PersistentVolumeClaim {name} in namespace {snapshot.key.namespace}: make it, or delete "
        return Finding(False, CacheReason.CLAIM_NOT_FOUND, f"{message}this.")
    owners = (snapshot.claim or {}).get("metadata", {}).get("ownerReferences") or ()
    if snapshot.claim is None or any(each.get("uid") == snapshot.uid for each in owners):
        return None
    message = f"PersistentVolumeClaim {name} exists and is not this cache's: name it in storage.persistentVolumeClaim, "
    return Finding(False, CacheReason.NAME_CONFLICT, f"{message}or delete it.", stalled=True)


def _filling(snapshot: CacheSnapshot, spec: ModelCacheSpec, image: JobImage, most_fetches: int) -> CacheDecision:
    asked, filled = asked_for(spec), snapshot.filled
    wanted = labels.short_hash([asked, snapshot.retry or ""])
    jobs = snapshot.tasks(FILL)
    job = next((each for each in jobs if each.asked == wanted), None)
    others = tuple(each.body for each in snapshot.jobs if job is None or each.body is not job.body)
    decision = CacheDecision(snapshot, _there(filled, spec), filled, discard=others)
    if job is None:
        due = _due(snapshot, spec, filled, asked)
        if due > snapshot.now:
            left = min((due - snapshot.now).total_seconds(), REST_SECONDS)
            return replace(decision, again=left)
        return _starting(decision, spec, image, most_fetches, asked=wanted, attempts=1)
    if not job.ended:
        finding = _still(decision.finding, CacheReason.FETCHING, _fetching(job, spec))
        return replace(decision, finding=finding, again=FETCHING_SECONDS)
    if job.complete:
        now_filled = _filled_by(job, snapshot, spec, asked)
        if now_filled is None:  # its answer went with its pod; the next one finds the files
            finding = _still(decision.finding, CacheReason.FETCHING, "Its files are looked at once more.")
            return replace(decision, finding=finding, discard=(*others, job.body), again=0.0)
        stale = garbage(now_filled, snapshot.used)
        again = 0.0 if stale else REST_SECONDS
        discard = (*others, job.body)
        return replace(decision, finding=_there(now_filled, spec), filled=now_filled, discard=discard, again=again)
    return _failed(decision, job, spec, image, most_fetches, wanted)


def _due(snapshot: CacheSnapshot, spec: ModelCacheSpec, filled: FilledStatus | None, asked: str) -> datetime:
    """When a Job is to look."""
    if filled is None or (filled.asked, filled.retry) != (asked, snapshot.retry) or garbage(filled, snapshot.used):
        return snapshot.now
    at = moment(filled.at)
    if spec.refresh_minutes is None or at is None:
        return datetime.max.replace(tzinfo=snapshot.now.tzinfo)
    return at + timedelta(minutes=spec.refresh_minutes)


def _starting(
    decision: CacheDecision,
    spec: ModelCacheSpec,
    image: JobImage,
    most_fetches: int,
    *,
    asked: str,
    attempts: int,
) -> CacheDecision:
    snapshot, filled = decision.snapshot, decision.filled
    if snapshot.others >= most_fetches:
        message = f"{snapshot.others} other caches are being fetched; the installation allows {most_fetches} at a time."
        finding = _still(decision.finding, CacheReason.QUEUED, message)
        return replace(decision, finding=finding, again=WAITING_SECONDS)
    verify = filled is not None and filled.retry != snapshot.retry
    keep = set() if filled is None else {filled.commit, *snapshot.used} & {filled.commit, *filled.held}
    start = fill_job(snapshot.body, spec, image, asked=asked, attempts=attempts, keep=keep, verify=verify)
    finding = _still(decision.finding, CacheReason.FETCHING, f"{spec.uri} is fetched.")
    return replace(decision, start=start, finding=finding, again=FETCHING_SECONDS)


def _failed(
    decision: CacheDecision, job: CacheJob, spec: ModelCacheSpec, image: JobImage, most_fetches: int, asked: str
) -> CacheDecision:
    snapshot = decision.snapshot
    retry_at = (job.failed_at or snapshot.now) + delay_after(job.attempts)
    if retry_at <= snapshot.now:
        started = _starting(decision, spec, image, most_fetches, asked=asked, attempts=job.attempts + 1)
        return replace(started, discard=(*started.discard, job.body)) if started.start is not None else started
    known = isinstance(job.end, UnfilledCache)
    reason = job.end.reason if isinstance(job.end, UnfilledCache) else CacheReason.FETCH_FAILED
    words = (job.end.message if isinstance(job.end, UnfilledCache) else job.failure).rstrip(".")
    message = (
        f"{words[:2000]}. It is tried again at {retry_at:%Y-%m-%dT%H:%M:%SZ}, or at once when annotation "
        f"{labels.RETRY} or the spec changes."
    )
    finding = _still(decision.finding, reason, message, stalled=known)
    return replace(decision, finding=finding, again=(retry_at - snapshot.now).total_seconds() + 0.1)


def _filled_by(job: CacheJob, snapshot: CacheSnapshot, spec: ModelCacheSpec, asked: str) -> FilledStatus | None:
    end = job.end
    if not isinstance(end, FilledCache):
        return None
    return FilledStatus(
        commit=end.commit,
        revision=spec.revision or "main",
        bytes=end.bytes,
        asked=asked,
        retry=snapshot.retry,
        at=snapshot.now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        fetched_bytes=end.fetched_bytes,
        repaired=end.repaired,
        held=tuple(sorted({end.commit, *end.held}))[:MOST_COMMITS],
    )


def _there(filled: FilledStatus | None, spec: ModelCacheSpec) -> Finding:
    """What holds by what is on the volume alone."""
    if filled is None or filled.revision != (spec.revision or "main"):
        return Finding(False, CacheReason.FETCHING, f"{spec.uri} is not there yet.")
    message = (
        f"{spec.uri} at {filled.revision} is commit {filled.commit}, {filled.bytes} bytes, verified by their hashes."
    )
    return Finding(True, CacheReason.FILLED, message)


def _still(there: Finding, reason: str, message: str, *, stalled: bool = False) -> Finding:
    """What goes on beside what is there: what ModelServes read stays theirs while a newer commit is looked for."""
    if not there.ready:
        return Finding(False, reason, message, stalled=stalled)
    if reason in (CacheReason.FETCHING, CacheReason.QUEUED):
        return there
    return Finding(True, reason, f"{there.message} The last look for a newer commit failed: {message}")


def _fetching(job: CacheJob, spec: ModelCacheSpec) -> str:
    told = job.progress
    if told is not None and told.total_bytes:
        left = f", {told.seconds_left} s left" if told.seconds_left is not None else ""
        return (
            f"{told.bytes} of {told.total_bytes} bytes of {spec.uri} are there, {told.bytes_per_second} bytes a "
            f"second{left}."
        )
    name = job.body["metadata"]["name"]
    return f"Job {name} fetches {spec.uri}" + (f"; {job.trouble}" if job.trouble else ".")


def _leaving(snapshot: CacheSnapshot, image: JobImage) -> CacheDecision:
    """Its bytes go once no ModelServe names it and none of their pods reads it."""
    filled = snapshot.filled
    if not snapshot.held:
        return CacheDecision(snapshot, Finding(False, CacheReason.FREEING, "It goes."), filled)
    if snapshot.users:
        named = ", ".join(snapshot.users[:5]) + (f" and {len(snapshot.users) - 5} more" if snapshot.users[5:] else "")
        message = f"It is being deleted, and waits for ModelServes that name it or read it: {named}."
        finding = Finding(False, CacheReason.IN_USE, message)
        return CacheDecision(snapshot, finding, filled, again=WAITING_SECONDS)
    fills = tuple(job.body for job in snapshot.tasks(FILL))
    finding = Finding(False, CacheReason.FREEING, "It is being deleted: its bytes go first.")
    decision = CacheDecision(snapshot, finding, filled, discard=fills, again=FETCHING_SECONDS)
    if fills:
        return decision
    if snapshot.claim is None or snapshot.spec is None:
        return replace(decision, release=True)
    if snapshot.spec.storage.volume is not None:
        return replace(decision, drop_claim=True, release=True)
    job = next(iter(snapshot.tasks(FREE)), None)
    if job is None:
        return replace(decision, start=free_job(snapshot.body, snapshot.spec, image, attempts=1))
    if job.complete:
        return replace(decision, release=True)
    if not job.ended:
        told = f"Job {job.body['metadata']['name']} removes its files" + (f"; {job.trouble}" if job.trouble else ".")
        return replace(decision, finding=replace(finding, message=told))
    retry_at = (job.failed_at or snapshot.now) + delay_after(job.attempts)
    if retry_at <= snapshot.now:
        start = free_job(snapshot.body, snapshot.spec, image, attempts=job.attempts + 1)
        return replace(decision, start=start, discard=(job.body,))
    message = (
        f"Its files cannot be removed: {job.failure}. It is tried again at {retry_at:%Y-%m-%dT%H:%M:%SZ}; without "
        f"finalizer {labels.FREE_CACHE} the object goes and they stay."
    )
    again = (retry_at - snapshot.now).total_seconds() + 0.1
    return replace(decision, finding=Finding(False, CacheReason.FREE_FAILED, message, stalled=True), again=again)
