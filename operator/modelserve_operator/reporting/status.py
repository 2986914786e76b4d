"""The whole status of a ModelServe from one Reconciliation, and the transitions worth an Event. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from modelserve.api import PlanStatus
from modelserve.api.cache_quality import MAX_QUALITIES, MeasuredCacheQuality
from modelserve.api.speed import CalibrationSpeed
from modelserve.planning import ENGINE_VERSION
from modelserve_operator import labels
from modelserve_operator.cluster.store import shown_speed
from modelserve_operator.inventory.measurements import weights_digest
from modelserve_operator.learning.calibration import calibration
from modelserve_operator.learning.speed_calibration import speed_calibration
from modelserve_operator.observed.snapshot import Body, Transition
from modelserve_operator.planning.decision import Finding, Warn
from modelserve_operator.planning.drafters import drafter_commits
from modelserve_operator.reasons import ConditionType, Phase, Reason
from modelserve_operator.reporting.conditions import conditions
from modelserve_operator.reporting.reconciliation import Reconciliation

MESSAGE_LIMIT = 2048
_TEXT = {True: "True", False: "False", None: "Unknown"}


def summarise(view: Reconciliation) -> dict[str, Any]:
    """`status` in full: what is not in it is not true. Conditions keep their transition time until they flip."""
    observed, decision = view.observed, view.decision
    found = dict(conditions(view))
    serving = [pod for pod in observed.pods if pod.uid in observed.endpoints]
    reports = [observed.reports[pod.uid] for pod in serving if pod.uid in observed.reports]
    status: dict[str, Any] = {
        "observedGeneration": observed.generation,
        "conditions": _merge(found, observed.model_serve, generation=observed.generation, now=observed.now),
        "phase": _phase(found, decision.planned).value,
        "replicas": len(observed.workers),  # of all revisions, as the selector counts them
        "readyReplicas": len(serving),
        "selector": labels.selector_text(observed.name),
    }
    if view.replicas is not None:
        status["desiredReplicas"] = view.replicas
    if observed.service is not None:
        status["url"] = f"http://{observed.name}.{observed.namespace}.svc/v1"
    previewed = decision.plan if decision.planned.reason == Reason.PLAN_PREVIEWED else None
    if reports:
        status["maxModelLen"] = min(report.max_model_len for report in reports)
    elif previewed is not None and previewed.max_model_len is not None:
        status["maxModelLen"] = previewed.max_model_len
    running = _serving_plan(view)
    shown = decision.plan or running  # while another waits, or the spec is refused, what runs is still shown
    proposed = decision.proposed.plan if decision.proposed is not None else None
    if running is not None and shown is not None and not shown.fits:  # also beside one that nothing can hold
        shown, proposed = running, shown
    if shown is not None:
        status["plan"] = shown.to_json()
    revision = decision.target.hash if decision.target is not None else None
    if revision is None and running is not None and running is shown:
        revision = view.step.serve
    before = (observed.model_serve.get("status") or {}).get("revision")
    if revision is None and before is not None and observed.history.blocking:
        status["revision"] = before  # what was wanted, for when it can be read
    if revision is not None:
        status["revision"] = labels.revision_name(observed.name, revision)
    if decision.target is not None and decision.target.commit:
        status["modelCommit"] = decision.target.commit
    if decision.target is not None:
        status |= drafter_commits(decision.target)
    if proposed is not None:
        status["proposedPlan"] = proposed.to_json()
    if decision.proposed is not None:
        status["proposedRevision"] = labels.revision_name(observed.name, decision.proposed.hash)
    if decision.waits is not None:
        status["waits"] = decision.waits
    measured = calibration(reports, running, speed=_speed(view, status.get("revision")))
    if measured is not None:
        status["calibration"] = measured.to_json()
    if qualities := _cache_quality(view):
        status["cacheQuality"] = [each.to_json() for each in qualities]
    return status


def _cache_quality(view: Reconciliation) -> list[MeasuredCacheQuality]:
    """What is known of 8-bit caches of these weights, whether workers run or not."""
    facts, source = view.decision.facts, view.decision.source
    if facts is None or source is None:
        return []
    weights = weights_digest(source.hash, facts)
    learned = view.observed.supply.learned.learned_for(facts, weights=weights, engine_version=ENGINE_VERSION)
    return [
        MeasuredCacheQuality(
            accelerator=product,
            dtype=found.dtype,
            layout=found.layout,
            holds=found.holds,
            divergence_nats=f"{found.kl:.4f}",
            same_token_percent=f"{100 * found.same:.2f}",
            needles=found.needles,
            needles_found=found.found,
            tokens=found.tokens,
            context_tokens=found.context,
        )
        for product, found in learned.cache_quality[:MAX_QUALITIES]
    ]


def _speed(view: Reconciliation, revision: str | None) -> tuple[CalibrationSpeed, ...]:
    """What the workers of the wanted revision measured of their steps; nothing while another one serves."""
    observed, target, facts = view.observed, view.decision.target, view.decision.facts
    if target is None or facts is None or view.step.serve != target.hash:
        return ()
    before = observed.model_serve.get("status") or {}
    pods = (pod for pod in observed.pods_of(target.hash) if pod.uid in observed.endpoints)
    return speed_calibration(
        (observed.reports[pod.uid] for pod in pods if pod.uid in observed.reports),
        target.plan,
        facts,
        observed.supply.catalogue.accelerators,
        shown=shown_speed(before) if before.get("revision") == revision else (),
    )


def _serving_plan(view: Reconciliation) -> PlanStatus | None:
    """The plan of the revision behind the Service: what its workers were promised."""
    revision = view.revisions.get(view.step.serve or "")
    return revision.plan if revision else None


def _merge(
    found: Mapping[ConditionType, Finding], model_serve: Body, *, generation: int, now: datetime
) -> list[dict[str, Any]]:
    before = {c.get("type"): c for c in (model_serve.get("status") or {}).get("conditions") or ()}
    merged = []
    for kind, finding in found.items():
        text = _TEXT[finding.ok]
        last = before.get(kind.value) or {}
        since = last.get("lastTransitionTime") if last.get("status") == text else None
        merged.append(
            {
                "type": kind.value,
                "status": text,
                "observedGeneration": generation,
                "lastTransitionTime": since or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "reason": str(finding.reason),
                "message": finding.message[:MESSAGE_LIMIT],
            }
        )
    return merged


def _phase(found: Mapping[ConditionType, Finding], planned: Finding) -> Phase:
    if ConditionType.STALLED in found:
        return Phase.STALLED
    if ConditionType.READY in found and found[ConditionType.READY].ok:
        return Phase.READY
    if planned.reason == Reason.INSPECTING_MODEL:
        return Phase.INSPECTING
    if planned.reason in (Reason.PLAN_PREVIEWED, Reason.WAITING_FOR_APPROVAL):
        return Phase.PLANNED
    return Phase.PROGRESSING if planned.ok else Phase.PENDING


_ANNOUNCED = {
    # condition type, status -> whether it is a warning
    (ConditionType.PLANNED, "True"): False,
    (ConditionType.READY, "True"): False,
    (ConditionType.CAPACITY_AVAILABLE, "False"): True,
    (ConditionType.STALLED, "True"): True,
}


_LOST = {(ConditionType.AVAILABLE, "False")}  # announced, as warnings, when they were True before


_ANNOUNCED_REASONS = {Reason.CONTEXT_REDUCED.value: True}  # reason -> whether it is a warning


def transitions(
    before: Mapping[str, Any], after: Mapping[str, Any], *, warnings: tuple[Warn, ...] = ()
) -> list[Transition]:
    """Announced conditions and reasons that came true (a condition also by a new reason) between two statuses.

    A warning is announced when the Planned message has it for the first time.
    """
    known = {(c["type"], c["status"], c["reason"]) for c in before.get("conditions") or ()}
    changed = (c for c in after["conditions"] if (c["type"], c["status"], c["reason"]) not in known)
    held = {(c["type"], c["status"]) for c in before.get("conditions") or ()}
    told = "".join(c["message"] for c in before.get("conditions") or () if c["type"] == ConditionType.PLANNED)
    found = [Transition(each.reason, each.message, True) for each in warnings if each.message not in told]
    for condition in changed:
        warning = _ANNOUNCED_REASONS.get(condition["reason"])
        if warning is None:
            warning = _ANNOUNCED.get((ConditionType(condition["type"]), condition["status"]))
        lost = (ConditionType(condition["type"]), condition["status"]) in _LOST
        if lost and (condition["type"], "True") in held and condition["reason"] != Reason.SCALED_TO_ZERO:
            warning = True
        told_already = any(each.reason == condition["reason"] for each in found)
        if warning is not None and not told_already:
            found.append(Transition(condition["reason"], condition["message"], warning))
    return found
