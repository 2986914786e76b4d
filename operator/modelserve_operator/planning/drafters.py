"""The drafter of a ModelServe: which one has to be read, what became of it in pods, what its workers say. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.api.drafter import DrafterPlan
from modelserve.planning.learned import pair_of
from modelserve.published import published_assistant
from modelserve_operator.observed.snapshot import Observed, WorkerReport
from modelserve_operator.planning.decision import Warn
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.sources import ModelSource, drafter_source

_FAR_BELOW = 0.5  # of the acceptance that a plan counts with


def drafter_to_read(spec: ModelServeSpec) -> ModelSource | None:
    """The assistant that a spec names, where no release ships its facts."""
    drafter = spec.drafter
    if drafter is None or drafter.uri is None or published_assistant(drafter.uri) is not None:
        return None
    return drafter_source(spec, drafter.uri, drafter.revision)


def resolved_drafter(revision: Revision, observed: Observed) -> Revision:
    """The revision with the commit of its assistant: the one that is kept, else what the first of its pods fetched."""
    if not revision.drafter_unresolved:
        return revision
    pods = sorted(observed.pods_of(revision.hash), key=lambda pod: (pod.created, pod.name))
    told = [pod.drafter.commit for pod in pods if pod.drafter is not None and pod.drafter.commit]
    known = observed.history.commit_of(revision.drafter_source)
    return replace(revision, drafter_commit=known or next(iter(told), ""))


def waits_for_commits(revision: Revision, observed: Observed) -> bool:
    """Whether one pod has to tell first what it serves. An assistant that could not be fetched holds up nobody."""
    tried = any(pod.drafter is not None or pod.ready for pod in observed.pods_of(revision.hash))
    return revision.unresolved or (revision.drafter_unresolved and not tried)


def acceptance_of(report: WorkerReport | None, plan: PlanStatus, model_uri: str) -> dict[str, float]:
    """What a worker measured of an assistant's drafts, by `pair_of`."""
    drafts, assistant = report.drafts if report is not None else None, _alone(plan.drafter)
    if drafts is None or drafts.acceptance is None or assistant is None:
        return {}
    return {pair_of(model_uri, assistant): drafts.acceptance}


def _alone(drafter: DrafterPlan | None) -> str | None:
    """URI of an assistant that drafts alone: where text is looked up as well, acceptance is also the text's."""
    return None if drafter is None or drafter.prompt_lookup else drafter.uri


def drafts_amiss(revision: Revision, observed: Observed) -> Iterator[Warn]:
    """What is wrong with the drafts of a revision's workers, which serve all the same. Numbers and names of pods, which
    come and go, are no part of it: each fault is told once."""
    drafter = revision.plan.drafter
    if drafter is None:
        return
    pods = observed.pods_of(revision.hash)
    reports = [observed.reports[pod.uid].drafts for pod in pods if pod.uid in observed.reports]
    fetched = [pod.drafter.problem for pod in pods if pod.drafter is not None and pod.drafter.problem]
    found = [told.problem for told in reports if told is not None and told.problem]
    if problems := fetched or found:  # a worker without files says less than the download
        yield Warn(
            Reason.DRAFTER_UNAVAILABLE,
            f"Workers serve without the drafter {drafter.uri}, slower and as well: {min(problems).rstrip('.')}. The "
            "next pod looks for it again.",
        )
    counted_on = _counted_on(revision.plan)
    measured = [told.acceptance for told in reports if told is not None and told.acceptance is not None]
    if any(told is not None and told.low_acceptance for told in reports):
        yield Warn(
            Reason.LOW_DRAFT_ACCEPTANCE,
            f"Under 5 % of what {drafter.uri or 'prompt lookup'} proposes has been right for minutes: it is not the "
            "drafter of this model, or the text does not repeat itself. Answers are right all the same; without "
            "spec.drafter they cost less.",
        )
    elif counted_on is not None and _alone(drafter) and min(measured, default=1.0) < _FAR_BELOW * counted_on:
        yield Warn(
            Reason.LOW_DRAFT_ACCEPTANCE,
            f"What {drafter.uri} proposes is right less than half as often as the {counted_on:.2f} that the plan "
            "counts with: it is the drafter of another fine-tune, a worker hands it the wrong rows, or the text is of "
            "another kind. Answers are right all the same, at less than the expected speed.",
        )


def _counted_on(plan: PlanStatus) -> float | None:
    """The chance of a draft to be right by which the plan expects its speed."""
    speeds = (each.speed for each in plan.candidates if each.verdict == "Chosen")
    return next((float(speed.drafts.acceptance) for speed in speeds if speed is not None and speed.drafts), None)
