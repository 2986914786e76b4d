"""The decision that a revision is wanted: what is told of it, and what is proposed in its place. Pure."""

from __future__ import annotations

from dataclasses import replace

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve_operator import labels
from modelserve_operator.observed.forgeries import differing_commits
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.amiss import exchanged_files
from modelserve_operator.planning.case import Case
from modelserve_operator.planning.decision import Decision, Finding, Warn
from modelserve_operator.planning.drafters import drafts_amiss, resolved_drafters
from modelserve_operator.planning.replan import same_plan
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision, bare


def wants(decision: Decision, revision: Revision, case: Case, *, read: bool = True) -> Decision:
    """The decision for a revision, committed before or by this very decision, with what is proposed beside it today.

    `read` False: the model or its drafter is being read, so what would be proposed is not known.
    """
    observed, name = case.observed, case.spec.plan.revision
    committed = resolved(observed.history.as_last(revision), observed)
    proposed = case.proposed_today if read else None
    if proposed is not None and proposed.runs == committed.runs:
        proposed = None
    decision = decision.warned(*exchanged_files(decision.facts, committed), *drafts_amiss(committed, observed))
    if differing := differing_commits(committed, observed.pods_of(committed.hash)):
        decision = decision.warned(Warn(Reason.COMMITS_DIFFER, differing))
    message = committed.plan.message or f"Plan {committed.plan.hash} is committed."
    if name is not None:
        message = f"Pinned by spec.plan.revision to {name}. {message}"
    if proposed is not None:
        message = f"{message.rstrip('.')}. {proposal_text(observed.name, committed, proposed)}"
    return replace(
        decision,
        planned=Finding(True, Reason.PLAN_COMMITTED, message),
        plan=with_candidates(committed, case.today).plan if read else committed.plan,
        proposed=proposed,
        target=committed,
        move=_move(committed, case) if read else None,
        waits=_what_waits(case.spec, committed, proposed) if proposed is not None else None,
    )


def resolved(revision: Revision, observed: Observed) -> Revision:
    """The revision with the commit that its pods serve: the one that is kept, else what the first of its pods told; of
    its drafters the same."""
    revision = resolved_drafters(revision, observed)
    if not revision.unresolved:
        return revision
    told = sorted((pod.created, pod.name, pod.commit) for pod in observed.pods_of(revision.hash) if pod.commit)
    kept = observed.history.commit_of(revision.source)
    return replace(revision, commit=kept or next((commit for *_, commit in told), ""))


def with_candidates(revision: Revision, today: PlanStatus) -> Revision:
    """A revision keeps the chosen candidate alone; the others of a plan of its hash, made just now, are shown too."""
    chosen = bare(revision.plan).candidates
    if revision.plan.hash != today.hash or not chosen:
        return revision
    candidates = tuple(chosen[0] if each.verdict == "Chosen" else each for each in today.candidates)
    return replace(revision, plan=revision.plan.model_copy(update={"candidates": candidates}))


def approve_command(name: str, approved: str) -> str:
    """What a user runs to commit a proposed plan; spec.plan.approvedHash does the same."""
    return f"kubectl annotate modelserve {name} --overwrite {labels.APPROVE_PLAN}={approved}"


def proposal_text(name: str, committed: Revision, proposed: Revision) -> str:
    """The hash of a proposal that does not wait for anything, and the command that commits it."""
    approved = proposed.hash if proposed.plan.hash == committed.plan.hash else proposed.plan.hash or proposed.hash
    return f"A newer plan {approved} on {proposed.plan.accelerator} is proposed: {approve_command(name, approved)}"


def _move(committed: Revision, case: Case) -> Revision | None:
    """The revision on a newer worker, where that is what a rolling update would commit."""
    builder, observed = case.builder, case.observed
    behind = builder.follows_operator(committed) and committed.worker.image != builder.settings.worker_image
    stays = case.named is not None or committed.hash not in observed.history.stored
    if stays or not behind or builder.policy != "Rolling":
        return None
    moved, ready = builder.moved(committed), any(pod.ready for pod in observed.pods_of(committed.hash))
    told = replace(moved.provenance, moved_from_ready=ready)
    return observed.history.as_last(replace(moved, provenance=told))


def _what_waits(spec: ModelServeSpec, committed: Revision, proposed: Revision) -> str:
    """`Plan` where another one would run; `Worker` where it is the same but for the worker's release and image."""
    return "Worker" if same_plan(committed, proposed, spec) else "Plan"


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
