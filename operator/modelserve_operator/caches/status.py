"""The whole status of a ModelCache, made anew from what is decided. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelserve.caches.model_cache import FetchStatus
from modelserve.caches.reports import CacheProgress
from modelserve_operator.caches.decision import CacheDecision
from modelserve_operator.caches.reasons import CacheReason
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.observed.transitions import conditions_of, transition_between
from modelserve_operator.sources import cache_claim

CONDITIONS = ("Ready", "Accepted", "Reconciling", "Stalled")


def status_of(decision: CacheDecision) -> dict[str, Any]:
    """The status. Conditions keep the time of their last transition."""
    snapshot, finding = decision.snapshot, decision.finding
    generation = snapshot.body["metadata"].get("generation")
    status: dict[str, Any] = {"observedGeneration": generation, "users": len(snapshot.users)}
    if snapshot.spec is not None and (snapshot.claim is not None or decision.claim is not None):
        status["claimName"] = cache_claim(snapshot.key.name, snapshot.spec.storage)
    if decision.filled is not None:
        status["filled"] = decision.filled.to_json()
        status["progress"] = _gigabytes(decision.filled.bytes)
    progress = _progress(decision)
    if progress is not None:
        shown = FetchStatus.model_validate(progress.model_dump())
        status["fetch"] = shown.to_json()
        share = int(100 * progress.bytes / max(progress.total_bytes, 1))
        status["progress"] = f"{share} % of {_gigabytes(progress.total_bytes)}"
    accepted: tuple[bool, str, str] | None = None
    if decision.refused is not None:
        accepted = False, decision.refused.reason, decision.refused.message
    elif not snapshot.leaving:
        accepted = True, CacheReason.VALID, "The spec is valid."
    conditions = conditions_of(finding, accepted, snapshot.status, generation=generation, now=snapshot.now)
    return {**status, "conditions": conditions}


def transitions(before: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[Transition]:
    """Events of a new status."""
    changed = transition_between(before, status)
    if changed is not None:
        yield changed
    old, new = before.get("filled") or {}, status.get("filled") or {}
    if old.get("commit") and old.get("revision") == new.get("revision") and old["commit"] != new.get("commit"):
        message = f"{new['revision']} is commit {new['commit']} now; it was {old['commit']}."
        yield Transition(CacheReason.MOVED, message, False)
    if new.get("repaired") and old.get("at") != new.get("at"):
        message = f"{new['repaired']} files were damaged, and were fetched anew; workers that run have read the others."
        yield Transition(CacheReason.REPAIRED, message, True)


def stands(status: Mapping[str, Any]) -> tuple[object, ...]:
    """What ModelServes make something of."""
    filled = status.get("filled") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    told = [(conditions.get(kind) or {}).get(field) for kind in ("Ready", "Stalled") for field in ("status", "reason")]
    return filled.get("commit"), filled.get("revision"), *told


def _progress(decision: CacheDecision) -> CacheProgress | None:
    running = (job.progress for job in decision.snapshot.jobs if not job.ended and job.progress is not None)
    return next((each for each in running if each.total_bytes), None)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
