"""The whole status of a ModelAdapter, made anew from what is decided and what workers say. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelserve.api.model_adapter import MOST_PROBLEMS
from modelserve_operator.adapters.acceptance import Refusal
from modelserve_operator.adapters.decision import AdapterDecision, Taken
from modelserve_operator.adapters.reasons import AdapterReason
from modelserve_operator.adapters.snapshot import (
    BROKEN,
    FAILED,
    NO_EFFECT,
    PARTLY,
    Adapter,
    AdapterSnapshot,
    AdapterWorker,
    Loaded,
    Problem,
)
from modelserve_operator.adapters.versions import Version
from modelserve_operator.observed.snapshot import Transition
from modelserve_operator.observed.transitions import Finding, conditions_of, transition_between

CONDITIONS = ("Ready", "Accepted", "Reconciling", "Stalled")
_OF_STATE = {
    FAILED: AdapterReason.LOAD_FAILED,
    NO_EFFECT: AdapterReason.NO_EFFECT,
    PARTLY: AdapterReason.PARTLY_NO_EFFECT,
}


def status_of(adapter: Adapter, decision: AdapterDecision) -> dict[str, Any]:
    """The status. Conditions keep the time of their last transition."""
    snapshot = decision.snapshot
    generation = adapter.body["metadata"].get("generation")
    if adapter.leaving:
        message = "Workers finish the requests that it answers; then it goes."
        finding = Finding(False, AdapterReason.DRAINING, message)
        return _with_conditions(_kept(adapter), adapter, finding, None, snapshot)
    refusal = decision.refused.get(adapter.uid)
    if refusal is not None:
        coming = refusal.reason is AdapterReason.MODEL_NOT_FOUND  # as a pipeline may bring it after the adapter
        finding = Finding(False, refusal.reason, refusal.message, stalled=not coming)
        kept = _kept(adapter) if refusal.held else {"servedName": adapter.served_name}
        return _with_conditions({**kept, "observedGeneration": generation}, adapter, finding, refusal, snapshot)
    (taken,) = (each for each in decision.taken if each.adapter.uid == adapter.uid)
    shown = {**_of_taken(taken, snapshot), "observedGeneration": generation}
    return _with_conditions(shown, adapter, _finding(taken, snapshot), None, snapshot)


def transition_of(adapter: Adapter, status: Mapping[str, Any]) -> Transition | None:
    """The Event of a new status: Ready says something else than before."""
    return transition_between(adapter.status, status)


def _kept(adapter: Adapter) -> dict[str, Any]:
    """What was said of versions and workers before: nothing new is known of them."""
    return {key: value for key, value in adapter.status.items() if key != "conditions"}


def _of_taken(taken: Taken, snapshot: AdapterSnapshot) -> dict[str, Any]:
    found, name, workers = taken.versions, taken.adapter.served_name, snapshot.counted
    told = [each for each in _told(workers, name, found.active) if each.state not in BROKEN]
    ready = sum(worker.serves(name, found.target.id) for worker in workers)
    problems = _problems(taken, workers)
    status: dict[str, Any] = {
        "servedName": name,
        "workers": {"ready": ready, "total": len(workers)},
        "readyOn": f"{ready}/{len(workers)}",
        "problems": problems[:MOST_PROBLEMS],
    }
    if found.active is not None:
        share = 100 - (found.weight if found.coming is not None else 0)
        status["activeVersion"] = _version(found.active, share, name, workers)
    if found.active is None or found.coming is not None or found.crowded:
        status["nextVersion"] = _version(found.target, found.weight, name, workers)
    if found.previous is not None:
        status["previousVersion"] = _version(found.previous, 0, name, workers)
    for field, value in (
        ("digest", next((each.digest for each in told if each.digest), None)),
        ("rank", next((each.rank for each in told if each.rank is not None), None)),
        ("sizeBytes", next((each.size_bytes for each in told if each.size_bytes is not None), None)),
        ("probe", _probe(told)),
    ):
        if value is not None:
            status[field] = value
    return status


def _told(workers: tuple[AdapterWorker, ...], name: str, version: Version | None) -> list[Loaded]:
    if version is None:
        return []
    return [each for worker in workers if (each := worker.version(name, version.id)) is not None]


def _version(version: Version, weight: int, name: str, workers: tuple[AdapterWorker, ...]) -> dict[str, Any]:
    digest = next((each.digest for each in _told(workers, name, version) if each.digest), None)
    return {
        "id": version.id,
        "uri": version.uri,
        **({"revision": version.revision} if version.revision is not None else {}),
        "weight": weight,
        **({"digest": digest} if digest is not None else {}),
        "readyWorkers": sum(worker.serves(name, version.id) for worker in workers),
    }


def _probe(told: list[Loaded]) -> dict[str, Any] | None:
    """Of the worker on which it changes least; the figures are decimal strings of three digits."""
    least = min((each.probe for each in told if each.probe is not None), key=lambda each: each.kl, default=None)
    if least is None:
        return None
    shown: dict[str, Any] = {
        "kl": f"{least.kl:.3g}",
        "top1Changed": f"{least.top1_changed:.3g}",
        "prompts": least.prompts,
    }
    strength = ", ".join(f"{linear} {ratio:.2g}" for linear, ratio in least.strength.items())
    return shown | ({"strength": strength} if strength else {})


def _problems(taken: Taken, workers: tuple[AdapterWorker, ...]) -> list[dict[str, str]]:
    """Of workers that do not serve the version of the spec, as far as they say why; in order of their names."""
    name, target, found = taken.adapter.served_name, taken.versions.target, []
    for worker in sorted(workers, key=lambda each: each.name):
        problem = worker.problem or _broken(worker.version(name, target.id))
        if problem is not None:
            found.append({"worker": worker.name, "reason": problem.reason[:64], "message": problem.message[:1024]})
    return found


def _broken(loaded: Loaded | None) -> Problem | None:
    if loaded is None or loaded.state not in BROKEN:
        return None
    words = loaded.message or loaded.reason or "the worker does not say why"
    return Problem(
        _OF_STATE[loaded.state], f"{loaded.reason}: {words}" if loaded.reason not in (None, words) else words
    )


def _finding(taken: Taken, snapshot: AdapterSnapshot) -> Finding:
    """The condition Ready of one that is taken. The first that holds of: nobody is there, a worker is amiss, the
    version is broken, it waits for room, it loads, workers answer by other weights yet, it serves."""
    found, name, workers = taken.versions, taken.adapter.served_name, snapshot.counted
    old = f" The version before, {found.active.uri}, serves." if found.coming and found.active else ""
    if not workers:
        return Finding(False, AdapterReason.NO_WORKERS, "No worker of the ModelServe is there yet.")
    if found.crowded:
        message = (
            "spec.adapters.max of the ModelServe has no room for a second version beside the first: raise it, "
            "or delete another adapter."
        )
        return Finding(False, AdapterReason.NO_ROOM_FOR_ROLLOUT, message, stalled=True)
    broken = next(_of_broken(taken, workers), None)
    if broken is not None:
        return Finding(False, broken[0], f"{broken[1]}.{old}", stalled=True)
    amiss = next((worker for worker in workers if worker.problem is not None), None)
    if amiss is not None and amiss.problem is not None:
        words = f"Worker {amiss.name}: {amiss.problem.message.rstrip('.')}.{old}"
        return Finding(False, AdapterReason(amiss.problem.reason), words)
    ready = sum(worker.serves(name, found.target.id) for worker in workers)
    if ready < len(workers):
        reason = AdapterReason.ROLLING_OUT if found.coming is not None else AdapterReason.LOADING
        return Finding(False, reason, f"{ready} of {len(workers)} workers have loaded {found.target.uri}.{old}")
    answered = sum(map(taken.answered_by, workers))
    if answered < len(workers):
        share = f"{found.weight if found.coming is not None else 100} %"
        message = f"All workers have loaded {found.target.uri}; {answered} of {len(workers)} answer {share} with it."
        return Finding(False, AdapterReason.ROLLING_OUT, message)
    if found.coming is not None:
        message = f"{found.weight} % of requests are answered by the new version; spec.rollout.weight 100 ends that."
        return Finding(True, AdapterReason.SHARED, message)
    return Finding(True, AdapterReason.SERVING, f"{ready} of {len(workers)} workers serve it as {name}.")


def _of_broken(taken: Taken, workers: tuple[AdapterWorker, ...]) -> Iterator[tuple[AdapterReason, str]]:
    name, target = taken.adapter.served_name, taken.versions.target
    for worker in workers:
        loaded = worker.version(name, target.id)
        problem = _broken(loaded)
        if loaded is not None and problem is not None:
            yield _OF_STATE[loaded.state], f"Worker {worker.name}: {problem.message.rstrip('.')[:2000]}"


def _with_conditions(
    status: dict[str, Any], adapter: Adapter, finding: Finding, refusal: Refusal | None, snapshot: AdapterSnapshot
) -> dict[str, Any]:
    accepted: tuple[bool, str, str] | None = None
    if refusal is not None:
        accepted = False, refusal.reason, refusal.message
    elif not adapter.leaving:
        accepted = True, AdapterReason.VALID, "The ModelServe takes it."
    generation = adapter.body["metadata"].get("generation")
    conditions = conditions_of(finding, accepted, adapter.status, generation=generation, now=snapshot.now)
    return {**status, "conditions": conditions}
