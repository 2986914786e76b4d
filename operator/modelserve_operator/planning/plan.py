"""What to do about one ModelServe: is the spec acceptable, what is the model, which revision is wanted. Pure.

`CHECKS` is the table of contents: the first check that finds something decides. A committed plan never changes: later
inventories, calibrations and operator releases only produce a proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelserve.errors import InvalidInput
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.amiss import MOST_FAULTS, reclaims, refused_objects
from modelserve_operator.planning.approval import choose
from modelserve_operator.planning.case import Case
from modelserve_operator.planning.decision import NOT_PLANNED, Decision, Finding, Warn
from modelserve_operator.planning.left_out import no_accelerators
from modelserve_operator.planning.reading import Reading, reading_of
from modelserve_operator.planning.replan import replan
from modelserve_operator.planning.wanted import approve_command, wants, with_candidates
from modelserve_operator.reasons import Reason
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource


def decide(observed: Observed, settings: Settings) -> Decision:
    """The whole decision. Raises nothing: every fault of the input is a Finding."""
    case = Case(observed, settings)
    decision = next(found for check in CHECKS if (found := check(case)) is not None)
    warnings = (*refused_objects(observed), *decision.warnings, *reclaims(decision, observed))
    message = " ".join([*(each.message for each in warnings), decision.planned.message])
    return replace(decision, planned=replace(decision.planned, message=message), warnings=warnings)


def spec_is_invalid(case: Case) -> Decision | None:
    """The schema, or a rule between fields, refuses the object."""
    return _invalid(lambda: case.parsed)


def spec_is_not_accepted(case: Case) -> Decision | None:
    """The installation does not allow the spec, or a claim cannot be in as many pods as it takes."""
    return None if case.accepted.ok else _refused(case.accepted)


def committed_revision_is_unreadable(case: Case) -> Decision | None:
    """Nothing is planned past a revision that cannot be read: what runs may be all that is right."""
    blocking = case.observed.history.blocking[:MOST_FAULTS]
    if not blocking:
        return None
    told = "; ".join(f"{each.kind} {each.name} cannot be read: {each.why}" for each in blocking)
    remedy = "run a release that reads it, or delete it: then another revision is planned and takes over"
    finding = Finding(None, Reason.REVISION_UNREADABLE, f"{told}. Everything stays as it is; {remedy}.")
    return Decision(case.accepted, finding, warnings=case.spec_faults, stalled=finding)


def cache_is_not_filled(case: Case) -> Decision | None:
    """The model is in a cache that is not there, or not filled, or another model's. What runs for this spec goes on."""
    missing = case.cache_missing
    if missing is None:
        return None
    stalled = missing if missing.ok is False else None
    committed = case.named
    if case.spec.plan.revision is None:
        committed = choose(case.committed, (), approvals=case.approvals, automatic=False).revision
    if committed is None or case.spec.plan.mode == "PreviewOnly":
        return Decision(case.accepted, missing, spec=case.spec, warnings=case.spec_faults, stalled=stalled)
    decision = Decision(case.accepted, missing, spec=case.spec, warnings=case.spec_faults)
    wanted = wants(decision, committed, case, read=False)
    told = f"{wanted.planned.message.rstrip('.')}. {missing.message}"
    return replace(wanted, planned=replace(wanted.planned, message=told))


def model_is_unread(case: Case) -> Decision | None:
    """The geometry of the model has to be read from its files first."""
    return _while_reading(case, reading_of(case.observed, case.source)) if case.facts is None else None


def drafter_is_unread(case: Case) -> Decision | None:
    """A drafter that the spec names is being read; one that cannot be read is planned without."""
    reading = next((each for each in case.drafter_readings if each.planned.ok is None), None)
    if reading is None:
        return None
    others = (each.source for each in case.drafter_readings if each is not reading)
    return _while_reading(case, reading, *others)


def named_revision_is_not_kept(case: Case) -> Decision | None:
    """A revision that somebody wants to go back to is not guessed: what runs stays as it is."""
    if case.spec.plan.revision is None or case.named is not None:
        return None
    kept = sorted(labels.revision_name(case.observed.name, each.hash) for each in case.observed.revisions)
    message = (
        f"spec.plan.revision {case.spec.plan.revision} names no revision that is kept: "
        f"{', '.join(kept) or 'there is none'}. What runs stays as it is."
    )
    finding = Finding(False, Reason.REVISION_UNKNOWN, message)
    return Decision(case.accepted, finding, warnings=case.unplanned.warnings, stalled=finding)


def settings_contradict_the_model(case: Case) -> Decision | None:
    """The spec is valid, but not for this model."""
    return _invalid(lambda: case.today)


def spec_names_a_revision(case: Case) -> Decision | None:
    """The committed revision that `spec.plan.revision` names runs, whatever else is proposed."""
    return wants(case.undecided, case.named, case) if case.named is not None else None


def spec_asks_for_a_preview(case: Case) -> Decision | None:
    """Mode PreviewOnly commits nothing: what runs stays, and the preview is beside it as a proposal."""
    if case.spec.plan.mode != "PreviewOnly":
        return None
    if not case.today.fits:
        return no_accelerator_is_offered(case) or model_does_not_fit(case)
    message = case.today.message or "Previewed; plan.mode PreviewOnly starts nothing."
    decision = replace(case.undecided, planned=Finding(True, Reason.PLAN_PREVIEWED, message))
    if case.proposed_today is None:
        return replace(decision, plan=case.today)
    return replace(decision, proposed=case.proposed_today)


def revision_is_committed(case: Case) -> Decision | None:
    """A revision runs: the last committed one, one that was approved, or in mode Automatic what is proposed first."""
    committed = case.choice.revision
    if committed is None:
        return None
    turn = replan(case.spec, committed, case.proposed_today, case.observed, approvals=case.approvals)
    told = (Warn(turn.reason, turn.why),) if turn.reason is not None else ()
    decision = replace(_with_unknown_approval(case), turn=turn).warned(*told)
    return wants(decision, turn.commit or committed, case)


def plan_waits_for_approval(case: Case) -> Decision | None:
    """A plan fits, and the mode leaves it to people to commit it."""
    if not case.proposed:
        return None
    waiting = case.proposed[0]
    approve = approve_command(case.observed.name, waiting.plan.hash or "")
    message = f"Plan {waiting.plan.hash} waits for approval: {approve}"
    planned = Finding(False, Reason.WAITING_FOR_APPROVAL, message)
    return replace(_with_unknown_approval(case), planned=planned, proposed=with_candidates(waiting, case.today))


def no_accelerator_is_offered(case: Case) -> Decision | None:
    """No node and no pool that may grow offers anything that the spec allows."""
    if case.today.candidates:
        return None
    finding = Finding(False, Reason.NO_ACCELERATORS, no_accelerators(case.spec, case.observed.supply))
    return replace(_with_unknown_approval(case), planned=finding, plan=case.today)


def model_does_not_fit(case: Case) -> Decision:
    """Everything that is offered is too small."""
    finding = Finding(False, Reason.DOES_NOT_FIT, case.today.message or "No accelerator can hold the model.")
    return replace(_with_unknown_approval(case), planned=finding, plan=case.today, stalled=finding)


CHECKS: tuple[Callable[[Case], Decision | None], ...] = (
    spec_is_invalid,
    spec_is_not_accepted,
    committed_revision_is_unreadable,
    cache_is_not_filled,
    model_is_unread,
    drafter_is_unread,
    named_revision_is_not_kept,
    settings_contradict_the_model,
    spec_names_a_revision,
    spec_asks_for_a_preview,
    revision_is_committed,
    plan_waits_for_approval,
    no_accelerator_is_offered,
    model_does_not_fit,
)


def _refused(accepted: Finding) -> Decision:
    return Decision(accepted, NOT_PLANNED, stalled=accepted)


def _invalid(asked: Callable[[], object]) -> Decision | None:
    try:
        asked()
    except InvalidInput as error:
        return _refused(Finding(False, Reason.INVALID_SPEC, str(error)))
    return None


def _while_reading(case: Case, reading: Reading, *others: ModelSource) -> Decision:
    """Of one, beside which `others` are looked for. A revision that was committed for this very spec runs, whatever
    comes of the reading."""
    decision = replace(case.unplanned, planned=reading.planned, stalled=reading.stalled)
    decision = replace(decision, inspect=(reading.source, *others))
    committed = case.named
    if case.spec.plan.revision is None:
        committed = choose(case.committed, (), approvals=case.approvals, automatic=False).revision
    if committed is None or case.spec.plan.mode == "PreviewOnly":
        return decision
    wanted = wants(decision, committed, case, read=False)
    again = "drafter" if reading.source.drafter else "model"
    told = f"{wanted.planned.message.rstrip('.')}. The {again} is read again: {reading.planned.message}"
    return replace(wanted, planned=replace(wanted.planned, message=told), stalled=None)


def _with_unknown_approval(case: Case) -> Decision:
    """What is known, with a warning of an approval that names nothing; a preview asks for none."""
    unknown = case.choice.unknown if case.spec.plan.mode != "PreviewOnly" else None
    if unknown is None:
        return case.undecided
    committed, proposed = case.choice.revision, case.proposed_today
    plans = [f"committed is {committed.plan.hash}"] if committed is not None else []
    plans += [f"proposed is {proposed.plan.hash}"] if proposed is not None else ["no plan fits now"]
    message = f"The approved hash {unknown} names no plan of this spec: {' and '.join(plans)}."
    return case.undecided.warned(Warn(Reason.APPROVAL_UNKNOWN, message))
