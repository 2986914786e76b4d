"""What to do about one ModelServe: is the spec acceptable, what is the model, which revision is wanted. Pure.

A committed plan never changes: later inventories, calibrations and operator releases only produce a proposal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from modelserve.api import ModelServe, ModelServeSpec, PlanStatus
from modelserve.catalogue import CATALOGUE_NAME
from modelserve.errors import InvalidInput
from modelserve.model.model_facts import ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.store import approver
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.manifests.worker_template import drafts
from modelserve_operator.observed.forgeries import differing_commits, refused_annotations
from modelserve_operator.observed.inspection import (
    inspection_failure,
    inspection_trouble,
    known_assistant,
    known_facts,
    left_behind,
    retry_at,
    suspended,
)
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.acceptance import acceptable
from modelserve_operator.planning.approval import Choice, choose, committed_last
from modelserve_operator.planning.decision import NOT_PLANNED, Decision, Finding, Warn
from modelserve_operator.planning.drafters import drafter_to_read, drafts_amiss, resolved_drafter
from modelserve_operator.planning.left_out import no_accelerators
from modelserve_operator.planning.replan import replan, same_plan
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for, worker_of_today
from modelserve_operator.planning.spot import short_notice
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.history import History
from modelserve_operator.revisions.revision import Revision, bare
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource, model_source, unpinned

MOST_FAULTS, FAULT_LIMIT = 3, 300  # of catalogue entries: how many are told, and characters of each


def decide(observed: Observed, settings: Settings) -> Decision:
    """The whole decision. Raises nothing: every fault of the input is a Finding."""
    decision = _decided(observed, settings)
    warnings = (*_refused_objects(observed), *decision.warnings, *_reclaims(decision, observed))
    message = " ".join([*(each.message for each in warnings), decision.planned.message])
    return replace(decision, planned=replace(decision.planned, message=message), warnings=warnings)


def _decided(observed: Observed, settings: Settings) -> Decision:
    try:
        parsed, unknown = ModelServe.parse_of_any_release(observed.model_serve)
    except InvalidInput as error:
        return _refused(Finding(False, Reason.INVALID_SPEC, str(error)))
    spec = parsed.spec
    source = model_source(spec)
    accepted = acceptable(spec, observed, settings)
    if not accepted.ok:
        return _refused(accepted)
    warnings = (*_unknown_fields(unknown), *(Warn(Reason.MODEL_UNPINNED, each) for each in unpinned(source)))
    if observed.history.blocking:
        finding = _unreadable(observed.history)
        return Decision(accepted, finding, warnings=warnings, stalled=finding)
    decision = Decision(accepted, NOT_PLANNED, spec=spec, source=source, warnings=warnings)
    facts = known_facts(observed, source)
    if facts is None:
        return _without_facts(decision, observed, source)
    warnings = (*warnings, *_catalogue_faults(spec, observed.supply.catalogue))
    decision = replace(decision, facts=facts, warnings=warnings)
    drafter = drafter_to_read(spec) if drafts(worker_of_today(spec, settings)) else None
    if drafter is not None:
        decision = replace(decision, drafter=drafter, assistant=known_assistant(observed, drafter))
        if decision.assistant is None:
            reading = _inspecting(decision, observed, drafter)
            if reading.planned.ok is None:
                return _without_facts(decision, observed, drafter)
            told = Warn(Reason.DRAFTER_UNAVAILABLE, f"Planned without the drafter: {reading.planned.message}")
            decision = replace(decision, inspect=(drafter,), warnings=(*warnings, told))
    return _planned(decision, observed, settings)


def _reclaims(decision: Decision, observed: Observed) -> Iterator[Warn]:
    """Of the plan that runs or would."""
    shown = next((each.plan for each in (decision.target, decision.proposed) if each is not None), decision.plan)
    if decision.spec is not None and shown is not None and shown.fits:
        told = short_notice(decision.spec, shown, observed.supply.pools)
        if told is not None:
            yield Warn(Reason.SPOT_NOTICE, f"{told}.")


def _refused_objects(observed: Observed) -> Iterator[Warn]:
    """What passes for a revision or for ours, and past revisions that cannot be read: none of it stops anything."""
    history = observed.history
    forged = refused_annotations(observed.deployments, observed.now)
    yield from (Warn(Reason.ANNOTATION_REFUSED, each) for each in islice(forged, MOST_FAULTS))
    yield from (Warn(Reason.REVISION_REFUSED, each) for each in islice(history.refused, MOST_FAULTS))
    past = (each for each in history.unreadable if not each.blocks)
    for each in islice(past, MOST_FAULTS):
        yield Warn(Reason.REVISION_UNREADABLE, f"{each.kind} {each.name} cannot be read: {each.why}.")


def _unknown_fields(unknown: tuple[str, ...]) -> tuple[Warn, ...]:
    if not unknown:
        return ()
    told = ", ".join(unknown[:MOST_FAULTS]) + (", ..." if len(unknown) > MOST_FAULTS else "")
    return (Warn(Reason.UNKNOWN_FIELDS, f"{told} of a later release: this one does not know it and ignores it."),)


def _unreadable(history: History) -> Finding:
    """Nothing is planned past a revision that cannot be read: what runs may be all that is right."""
    told = "; ".join(f"{each.kind} {each.name} cannot be read: {each.why}" for each in history.blocking[:MOST_FAULTS])
    remedy = "run a release that reads it, or delete it: then another revision is planned and takes over"
    return Finding(None, Reason.REVISION_UNREADABLE, f"{told}. Everything stays as it is; {remedy}.")


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


def _inspecting(decision: Decision, observed: Observed, source: ModelSource) -> Decision:
    name = labels.inspection_name(observed.name, source.hash)
    failure = inspection_failure(observed, name)
    if failure is None:
        pods = [pod for pod in observed.pods if pod.job == name]
        waits = next((pod.unschedulable or pod.trouble for pod in pods if pod.unschedulable or pod.trouble), None)
        trouble = inspection_trouble(observed, name)
        waits = trouble.message if trouble is not None else suspended(observed, name) or waits
        what = "drafter" if source.drafter else "model"
        message = f"Job {name} reads the {what} at {source.uri}" + (f"; {waits}" if waits else ".")
        stalled = Finding(False, trouble.reason, trouble.message) if trouble is not None else None
        return replace(
            decision, planned=Finding(None, Reason.INSPECTING_MODEL, message), stalled=stalled, inspect=(source,)
        )
    again = f"at {retry_at(observed, name) or observed.now:%Y-%m-%dT%H:%M:%SZ}"
    if (hanging := left_behind(observed, name)) is not None:
        again = f"once its pod {hanging} has ended, which it does not as long as its volume or its node hangs"
    about = "drafter" if source.drafter else "model"
    finding = Finding(
        False,
        failure.reason,
        f"{failure.message.rstrip('.')}. It is tried again {again}, or at once when annotation {labels.RETRY}, "
        f"spec.{about} or spec.pod changes.",
    )
    return replace(decision, planned=finding, stalled=finding, inspect=(source,))


def _without_facts(decision: Decision, observed: Observed, source: ModelSource) -> Decision:
    """The model is to be read. A revision that was committed for this very spec runs, whatever comes of it."""
    assert decision.spec is not None
    inspecting, spec = _inspecting(decision, observed, source), decision.spec
    history = observed.history
    if spec.plan.revision is not None:
        choice = Choice(history.named(spec.plan.revision))
    else:
        asked = (spec.plan.approved_hash, labels.annotation_of(observed.model_serve, labels.APPROVE_PLAN))
        choice = choose(history.of(spec), (), approvals=filter(None, asked), automatic=False)
    if choice.committed is None or spec.plan.mode == "PreviewOnly":
        return inspecting
    committed = _committed_decision(inspecting, history.committed(choice.committed), None, None, observed, None)
    again = "drafter" if source.drafter else "model"
    told = f"{committed.planned.message.rstrip('.')}. The {again} is read again: {inspecting.planned.message}"
    return replace(committed, planned=replace(committed.planned, message=told), stalled=None)


def _planned(decision: Decision, observed: Observed, settings: Settings) -> Decision:
    assert decision.spec is not None
    assert decision.source is not None
    assert decision.facts is not None
    source, facts = decision.source, decision.facts
    spec, mode, history = decision.spec, decision.spec.plan.mode, observed.history
    known, before = history.of(spec), history.planned_for(spec)
    pinned = history.named(spec.plan.revision) if spec.plan.revision is not None else None
    if spec.plan.revision is not None and pinned is None:
        return _unknown_pin(decision, observed)
    worker, sized = worker_of_today(spec, settings), spec
    if spec.drafter is not None and spec.drafter.asks and not drafts(worker):
        message = (
            f"spec.drafter is left out: worker {worker.image} is of release {worker.release}, which has no drafts."
        )
        decision = replace(decision, warnings=(*decision.warnings, Warn(Reason.DRAFTER_UNAVAILABLE, message)))
        sized = spec.model_copy(update={"drafter": None})
    try:
        today = plan_for(
            sized,
            facts,
            observed.supply,
            committed=committed_last(known) or before,
            assistant=decision.assistant,
            image_architectures=settings.worker_architectures,
        )
    except InvalidInput as error:
        return _refused(Finding(False, Reason.INVALID_SPEC, str(error)))
    builder = RevisionBuilder(
        spec,
        observed.name,
        source,
        facts,
        settings,
        generation=observed.generation,
        approved_by=approver(observed.model_serve),
        assistant=decision.assistant,
    )
    fresh, previewed = None, mode == "PreviewOnly"
    if today.fits and (observed.deployments or not previewed):  # beside nothing a preview is its plan alone
        fresh = builder.planned(today)
    if pinned is not None:
        return _committed_decision(decision, history.committed(pinned), fresh, today, observed, builder)
    if previewed:
        return _previewed(decision, today, fresh, observed)
    carried = builder.carried(before) if before is not None and not known else None
    offered = tuple(each for each in (carried, fresh) if each is not None)
    asked = (spec.plan.approved_hash, labels.annotation_of(observed.model_serve, labels.APPROVE_PLAN))
    approvals = tuple(filter(None, asked))
    choice = choose(known, offered, approvals=approvals, automatic=mode == "Automatic")
    if choice.unknown is not None:
        decision = replace(decision, warnings=(*decision.warnings, _unknown_approval(choice, fresh)))
    if choice.committed is not None:
        turn = replan(spec, choice.committed, fresh, observed, approvals=approvals)
        told = (Warn(turn.reason, turn.why),) if turn.reason is not None else ()
        decision = replace(decision, turn=turn, warnings=(*decision.warnings, *told))
        committed = history.committed(turn.commit or choice.committed)
        return _committed_decision(decision, committed, fresh, today, observed, builder)
    if offered:
        waiting = offered[0]
        approve = approve_command(observed.name, waiting.plan.hash or "")
        message = f"Plan {waiting.plan.hash} waits for approval: {approve}"
        planned = Finding(False, Reason.WAITING_FOR_APPROVAL, message)
        return replace(decision, planned=planned, proposed=_with_candidates(waiting, today))
    return _impossible(decision, today, observed)


def _with_candidates(revision: Revision, today: PlanStatus) -> Revision:
    """A revision keeps the chosen candidate alone; the others of a plan of its hash, made just now, are shown too."""
    chosen = bare(revision.plan).candidates
    if revision.plan.hash != today.hash or not chosen:
        return revision
    candidates = tuple(chosen[0] if each.verdict == "Chosen" else each for each in today.candidates)
    return replace(revision, plan=revision.plan.model_copy(update={"candidates": candidates}))


def _unknown_pin(decision: Decision, observed: Observed) -> Decision:
    """What runs stays as it is: a revision that somebody wants to go back to is not guessed."""
    kept = sorted(labels.revision_name(observed.name, each.hash) for each in observed.revisions)
    message = (
        f"spec.plan.revision {decision.spec.plan.revision if decision.spec else ''} names no revision that is kept: "
        f"{', '.join(kept) or 'there is none'}. What runs stays as it is."
    )
    finding = Finding(False, Reason.REVISION_UNKNOWN, message)
    return Decision(decision.accepted, finding, warnings=decision.warnings, stalled=finding)


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


def _committed_decision(
    decision: Decision,
    committed: Revision,
    fresh: Revision | None,
    today: PlanStatus | None,
    observed: Observed,
    builder: RevisionBuilder | None,
) -> Decision:
    """`fresh`, `today` and `builder`: what would be committed now; None where that is not known."""
    committed = resolved(committed, observed)
    if decision.facts is not None:
        decision = replace(decision, warnings=(*decision.warnings, *_exchanged(decision.facts, committed)))
    decision = replace(decision, warnings=(*decision.warnings, *drafts_amiss(committed, observed)))
    if differing := differing_commits(committed, observed.pods_of(committed.hash)):
        decision = replace(decision, warnings=(*decision.warnings, Warn(Reason.COMMITS_DIFFER, differing)))
    drifted = fresh is not None and fresh.runs != committed.runs
    message = committed.plan.message or f"Plan {committed.plan.hash} is committed."
    pinned = decision.spec.plan.revision if decision.spec is not None else None
    if pinned is not None:
        message = f"Pinned by spec.plan.revision to {pinned}. {message}"
    stays = builder is None or pinned is not None or committed.hash not in observed.history.stored
    if fresh is not None and drifted:
        message = f"{message.rstrip('.')}. {proposal_text(observed.name, committed, fresh)}"
    return replace(
        decision,
        planned=Finding(True, Reason.PLAN_COMMITTED, message),
        plan=committed.plan if today is None else _with_candidates(committed, today).plan,
        proposed=fresh if drifted else None,
        target=committed,
        move=_move(committed, observed, builder) if builder is not None and not stays else None,
        waits=_what_waits(decision.spec, committed, fresh) if decision.spec and fresh is not None and drifted else None,
    )


def _exchanged(facts: ModelFacts, committed: Revision) -> Iterator[Warn]:
    """Where the files were read again since: a worker that starts now serves others than those that run."""
    if facts.identity and committed.identity and facts.identity != committed.identity:
        message = f"The checkpoint's files are not those that plan {committed.plan.hash} was made for."
        yield Warn(Reason.MODEL_CHANGED, message)


def resolved(revision: Revision, observed: Observed) -> Revision:
    """The revision with the commit that its pods serve: the one that is kept, else what the first of its pods told; of
    its assistant the same."""
    revision = resolved_drafter(revision, observed)
    if not revision.unresolved:
        return revision
    told = sorted((pod.created, pod.name, pod.commit) for pod in observed.pods_of(revision.hash) if pod.commit)
    known = observed.history.commit_of(revision.source)
    return replace(revision, commit=known or next((commit for *_, commit in told), ""))


def _move(committed: Revision, observed: Observed, builder: RevisionBuilder) -> Revision | None:
    """The revision on a newer worker, where that is what a rolling update would commit."""
    behind = builder.follows_operator(committed) and committed.worker.image != builder.settings.worker_image
    if not behind or builder.policy != "Rolling":
        return None
    moved, ready = builder.moved(committed), any(pod.ready for pod in observed.pods_of(committed.hash))
    told = replace(moved.provenance, moved_from_ready=ready)
    return observed.history.committed(replace(moved, provenance=told))


def _what_waits(spec: ModelServeSpec, committed: Revision, fresh: Revision) -> str:
    """`Plan` where another one would run; `Worker` where it is the same but for the worker's release and image."""
    return "Worker" if same_plan(committed, fresh, spec) else "Plan"


def moving(decision: Decision) -> Decision:
    """The decision with its move committed."""
    if decision.move is None:
        return decision
    plan, kept = decision.move.plan, decision.proposed if decision.waits == "Plan" else None
    shown = plan.model_copy(update={"candidates": decision.plan.candidates}) if decision.plan is not None else plan
    message = f"Moves to worker {decision.move.worker.image} with the same plan. {decision.planned.message}"
    told = replace(decision.planned, message=message)
    waits = decision.waits if kept is not None else None
    return replace(decision, planned=told, plan=shown, proposed=kept, target=decision.move, move=None, waits=waits)


def waiting_to_move(decision: Decision, why: str) -> Decision:
    """The decision while its move waits."""
    message = f"{decision.planned.message.rstrip('.')}. A newer worker waits: {why}."
    return replace(decision, planned=replace(decision.planned, message=message))


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
