"""What to do about one ModelServe: is the spec acceptable, what is the model, which revision is wanted. Pure.

A committed plan never changes: later inventories, calibrations and operator releases only produce a proposal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from modelserve.api import ModelServe, ModelServeSpec, PlanStatus
from modelserve.errors import InvalidInput
from modelserve.model_facts import ModelFacts
from modelserve_operator import labels
from modelserve_operator.approval import Choice, choose, committed_last
from modelserve_operator.catalogue import CATALOGUE_NAME, Catalogue
from modelserve_operator.inspection import inspection_failure, inspection_trouble, known_facts, retry_at
from modelserve_operator.left_out import no_accelerators
from modelserve_operator.observed import Observed
from modelserve_operator.reasons import Reason
from modelserve_operator.revision import Revision, spec_hash
from modelserve_operator.revision_builder import build_revision, plan_for
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource, model_source

MOST_FAULTS, FAULT_LIMIT = 3, 300  # of catalogue entries: how many are told, and characters of each


@dataclass(frozen=True)
class Finding:
    """One answer, as a condition tells it. `ok` None means that it is not known yet."""

    ok: bool | None
    reason: str
    message: str


@dataclass(frozen=True)
class Warn:
    """Something that is amiss and stops nothing."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Decision:
    """What was found about the spec, and what is wanted. Fields stay None where an earlier answer is missing."""

    accepted: Finding
    planned: Finding
    spec: ModelServeSpec | None = None
    source: ModelSource | None = None
    facts: ModelFacts | None = None
    inspect: bool = False  # the inspect Job should exist
    plan: PlanStatus | None = None  # for status.plan
    proposed: Revision | None = None  # for status.proposedPlan
    target: Revision | None = None
    warnings: tuple[Warn, ...] = ()  # what is amiss beside the spec, at the head of the Planned message
    stalled: Finding | None = None

    @property
    def rests(self) -> bool:
        """Nothing changes until the user says so: a preview, or a plan that waits for approval."""
        return self.planned.reason in (Reason.PLAN_PREVIEWED, Reason.WAITING_FOR_APPROVAL)


NOT_PLANNED = Finding(None, Reason.BLOCKED, "The spec was not accepted.")


def decide(observed: Observed, settings: Settings) -> Decision:
    """The whole decision. Raises nothing: every fault of the input is a Finding."""
    document = {key: value for key, value in observed.model_serve.items() if key != "status"}
    try:
        spec = ModelServe.parse(document).spec
    except InvalidInput as error:
        return _refused(Finding(False, Reason.INVALID_SPEC, str(error)))
    source = model_source(spec)
    accepted = _acceptable(spec, observed)
    if not accepted.ok:
        return _refused(accepted)
    decision = Decision(accepted, NOT_PLANNED, spec=spec, source=source)
    facts = known_facts(observed, source)
    if facts is None:
        return _without_facts(decision, observed, source)
    warnings = _catalogue_faults(spec, observed.supply.catalogue)
    planned = _planned(replace(decision, facts=facts, warnings=warnings), observed, settings)
    told = replace(
        planned.planned, message=" ".join([*(each.message for each in planned.warnings), planned.planned.message])
    )
    return replace(planned, planned=told)


def _catalogue_faults(spec: ModelServeSpec, catalogue: Catalogue) -> tuple[Warn, ...]:
    """Entries that this spec would use, were they right; the first few say enough."""
    named = spec.accelerators.products if spec.accelerators else None
    faults = (fault for product, fault in catalogue.faults.items() if named is None or product in named)
    return tuple(
        Warn(
            Reason.CATALOGUE_ENTRY_IGNORED,
            f"ConfigMap {CATALOGUE_NAME}: {fault[:FAULT_LIMIT]}; the entry is ignored.",
        )
        for fault in islice(faults, MOST_FAULTS)
    )


def _refused(accepted: Finding) -> Decision:
    return Decision(accepted, NOT_PLANNED, stalled=accepted)


def _acceptable(spec: ModelServeSpec, observed: Observed) -> Finding:
    if spec.drafter is not None:
        message = f"drafter.uri {spec.drafter.uri}: this release does not run speculative decoding; remove spec.drafter"
        return Finding(False, Reason.UNSUPPORTED_FEATURE, message)
    pods = spec.replicas + spec.rollout.max_surge
    for claim, modes in observed.claim_modes.items():
        shareable = modes is None or {"ReadOnlyMany", "ReadWriteMany"} & set(modes)
        if pods > 1 and not shareable:
            message = (
                f"claim {claim} is {', '.join(modes or ())}, but replicas {spec.replicas} and rollout.maxSurge "
                f"{spec.rollout.max_surge} need it in {pods} pods at a time; use a ReadOnlyMany or ReadWriteMany "
                "claim, or replicas 1 with rollout {maxSurge: 0, allowDowntime: true}"
            )
            return Finding(False, Reason.VOLUME_NOT_SHAREABLE, message)
    return Finding(True, Reason.VALID, "The spec is valid.")


def _inspecting(decision: Decision, observed: Observed, source: ModelSource) -> Decision:
    name = labels.inspection_name(observed.name, source.hash)
    failure = inspection_failure(observed, name)
    if failure is None:
        pods = [pod for pod in observed.pods if pod.job == name]
        waits = next((pod.unschedulable or pod.trouble for pod in pods if pod.unschedulable or pod.trouble), None)
        trouble = inspection_trouble(observed, name)
        waits = trouble.message if trouble is not None else waits
        message = f"Job {name} reads the model at {source.uri}" + (f"; {waits}" if waits else ".")
        stalled = Finding(False, trouble.reason, trouble.message) if trouble is not None else None
        return replace(decision, planned=Finding(None, Reason.INSPECTING_MODEL, message), stalled=stalled, inspect=True)
    again = retry_at(observed, name) or observed.now
    finding = Finding(
        False,
        failure.reason,
        f"{failure.message.rstrip('.')}. It is tried again at {again:%Y-%m-%dT%H:%M:%SZ}, or at once when annotation "
        f"{labels.RETRY} or spec.model changes.",
    )
    return replace(decision, planned=finding, stalled=finding, inspect=True)


def _without_facts(decision: Decision, observed: Observed, source: ModelSource) -> Decision:
    """The model is to be read. A revision that was committed for this very spec runs, whatever comes of it."""
    assert decision.spec is not None
    inspecting, spec = _inspecting(decision, observed, source), decision.spec
    known = tuple(revision for revision in observed.revisions if revision.spec_hash == spec_hash(spec))
    approvals = filter(None, (spec.plan.approved_hash, labels.annotation_of(observed.model_serve, labels.APPROVE_PLAN)))
    choice = choose(known, None, approvals=approvals, automatic=False, now=observed.now)
    if choice.committed is None or spec.plan.mode == "PreviewOnly":
        return inspecting
    committed = _committed_decision(inspecting, choice.committed, None, name=observed.name)
    told = f"{committed.planned.message.rstrip('.')}. The model is read again: {inspecting.planned.message}"
    return replace(committed, planned=replace(committed.planned, message=told), stalled=None)


def _planned(decision: Decision, observed: Observed, settings: Settings) -> Decision:
    assert decision.spec is not None
    assert decision.source is not None
    assert decision.facts is not None
    spec, mode = decision.spec, decision.spec.plan.mode
    known = tuple(revision for revision in observed.revisions if revision.spec_hash == spec_hash(spec))
    try:
        fresh_plan = plan_for(spec, decision.facts, observed.supply, committed=committed_last(known))
    except InvalidInput as error:
        finding = Finding(False, Reason.INVALID_SPEC, str(error))
        return replace(decision, accepted=finding, planned=NOT_PLANNED, stalled=finding)
    fresh, previewed = None, mode == "PreviewOnly"
    if fresh_plan.fits and (observed.deployments or not previewed):  # beside nothing a preview is its plan alone
        fresh = build_revision(
            spec, fresh_plan, name=observed.name, source=decision.source, facts=decision.facts, settings=settings
        )
    if previewed:
        return _previewed(decision, fresh_plan, fresh, observed)
    approvals = (spec.plan.approved_hash, labels.annotation_of(observed.model_serve, labels.APPROVE_PLAN))
    choice = choose(
        known,
        fresh,
        approvals=filter(None, approvals),
        automatic=mode == "Automatic",
        now=observed.now,
    )
    if choice.unknown is not None:
        decision = replace(decision, warnings=(*decision.warnings, _unknown_approval(choice, fresh)))
    if choice.committed is not None:
        return _committed_decision(decision, choice.committed, fresh, name=observed.name)
    if fresh is not None:
        message = f"Plan {fresh.plan.hash} waits for approval: {approve_command(observed.name, fresh.plan.hash or '')}"
        return replace(decision, planned=Finding(False, Reason.WAITING_FOR_APPROVAL, message), proposed=fresh)
    return _impossible(decision, fresh_plan, observed)


def approve_command(name: str, approved: str) -> str:
    """What a user runs to commit a proposed plan; spec.plan.approvedHash does the same."""
    return f"kubectl annotate modelserve {name} --overwrite {labels.APPROVE_PLAN}={approved}"


def proposal_text(name: str, committed: Revision, fresh: Revision) -> str:
    """The hash of a proposal that does not wait for anything, and the command that commits it."""
    approved = fresh.hash if fresh.plan.hash == committed.plan.hash else fresh.plan.hash or fresh.hash
    return f"A newer plan {approved} on {fresh.plan.accelerator} is proposed: {approve_command(name, approved)}"


def _unknown_approval(choice: Choice, fresh: Revision | None) -> Warn:
    known = [f"committed is {choice.committed.plan.hash}"] if choice.committed is not None else []
    known += [f"proposed is {fresh.plan.hash}"] if fresh is not None else ["no plan fits now"]
    message = f"The approved hash {choice.unknown} names no plan of this spec: {' and '.join(known)}."
    return Warn(Reason.APPROVAL_UNKNOWN, message)


def _committed_decision(decision: Decision, committed: Revision, fresh: Revision | None, *, name: str) -> Decision:
    drifted = fresh is not None and fresh.hash != committed.hash
    message = committed.plan.message or f"Plan {committed.plan.hash} is committed."
    if fresh is not None and drifted:
        message = f"{message.rstrip('.')}. {proposal_text(name, committed, fresh)}"
    return replace(
        decision,
        planned=Finding(True, Reason.PLAN_COMMITTED, message),
        plan=committed.plan,
        proposed=fresh if drifted else None,
        target=committed,
    )


def _previewed(decision: Decision, plan: PlanStatus, fresh: Revision | None, observed: Observed) -> Decision:
    """Nothing is committed. What runs already stays, and the preview is beside it as a proposal."""
    if not plan.fits:
        return _impossible(decision, plan, observed)
    message = plan.message or "Previewed; plan.mode PreviewOnly starts nothing."
    decision = replace(decision, planned=Finding(True, Reason.PLAN_PREVIEWED, message))
    return replace(decision, plan=plan) if fresh is None else replace(decision, proposed=fresh)


def _impossible(decision: Decision, plan: PlanStatus, observed: Observed) -> Decision:
    if not plan.candidates and decision.spec is not None:
        message = no_accelerators(decision.spec, observed.supply)
        return replace(decision, planned=Finding(False, Reason.NO_ACCELERATORS, message), plan=plan)
    finding = Finding(False, Reason.DOES_NOT_FIT, plan.message or "No accelerator can hold the model.")
    return replace(decision, planned=finding, plan=plan, stalled=finding)
