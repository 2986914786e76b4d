"""The drafters of a ModelServe: which have to be read, what became of them in pods, what their workers say. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.measured_drafts import MeasuredDrafts
from modelserve.planning.drafts import named_drafters
from modelserve.planning.learned import pair_of
from modelserve.published import published_assistant
from modelserve_operator.observed.snapshot import Observed, WorkerReport
from modelserve_operator.planning.decision import Warn
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.sources import ModelSource, drafter_source

_FAR_BELOW = 0.5  # of the acceptance that a plan counts with


def drafters_to_read(spec: ModelServeSpec) -> tuple[ModelSource, ...]:
    """The drafters that a spec names itself, where no release ships their facts."""
    named = (each for each in named_drafters(spec) if published_assistant(each.uri) is None)
    return tuple(drafter_source(spec, each.uri, each.revision) for each in named)


def resolved_drafters(revision: Revision, observed: Observed) -> Revision:
    """The revision with the commits of its drafters: those that are kept, else what the first of its pods fetched."""
    unresolved = revision.unresolved_drafters
    if not unresolved:
        return revision
    pods = sorted(observed.pods_of(revision.hash), key=lambda pod: (pod.created, pod.name))
    told = [dict(pod.drafters) for pod in pods]
    commits = list(map(revision.drafter_commit, range(len(revision.drafter_sources))))
    for number in unresolved:
        fetched = (each[number].commit for each in told if number in each)
        known = observed.history.commit_of(revision.drafter_sources[number])
        commits[number] = known or next(filter(None, fetched), "")
    return replace(revision, drafter_commits=tuple(commits))


def waits_for_commits(revision: Revision, observed: Observed) -> bool:
    """Whether one pod has to tell first what it serves. A drafter that could not be fetched holds up nobody."""
    wanted = set(revision.unresolved_drafters)
    tried = any(wanted <= set(dict(pod.drafters)) or pod.ready for pod in observed.pods_of(revision.hash))
    return revision.unresolved or (bool(wanted) and not tried)


def drafter_commits(revision: Revision) -> dict[str, Any]:
    """Commits of a revision's drafters as fields of the status, as far as they are known."""
    named = revision.plan.drafter.named if revision.plan.drafter is not None else ()
    known = {uri: commit for number, (uri, _) in enumerate(named) if (commit := revision.drafter_commit(number))}
    if len(named) > 1:
        return {"drafterCommits": known} if known else {}
    return {"drafterCommit": next(iter(known.values()))} if known else {}


def acceptance_of(report: WorkerReport | None, plan: PlanStatus, model_uri: str) -> dict[str, float]:
    """What a worker measured of drafters' drafts, by `pair_of`."""
    drafts = report.drafts if report is not None else None
    return {} if drafts is None else {pair_of(model_uri, uri): chance for uri, chance in _measured(drafts, plan)}


def _measured(drafts: MeasuredDrafts, plan: PlanStatus) -> Iterator[tuple[str, float]]:
    """Chances of drafters, by address. Where text is looked up as well, they are also the text's and say nothing."""
    named = () if plan.drafter is None or plan.drafter.prompt_lookup else plan.drafter.named
    told = (drafts.acceptance,) if len(named) == 1 else drafts.acceptances or ()
    if len(told) == len(named):  # a worker that goes without one of two tells of the other alone
        yield from ((uri, chance) for (uri, _), chance in zip(named, told, strict=True) if chance is not None)


def drafts_amiss(revision: Revision, observed: Observed) -> Iterator[Warn]:
    """What is wrong with the drafts of a revision's workers, which serve all the same. Numbers and names of pods, which
    come and go, are no part of it: each fault is told once."""
    drafter = revision.plan.drafter
    if drafter is None:
        return
    pods, names = observed.pods_of(revision.hash), " and ".join(uri for uri, _ in drafter.named)
    reports = [observed.reports[pod.uid].drafts for pod in pods if pod.uid in observed.reports]
    numbered = dict(enumerate(uri for uri, _ in drafter.named))
    told = [each for pod in pods for each in pod.drafters]
    fetched = [(numbered.get(number, names), each.problem) for number, each in told if each.problem]
    found = [(names, report.problem) for report in reports if report is not None and report.problem]
    if problems := fetched or found:  # a worker without files says less than the download
        uri, problem = min(problems)
        yield Warn(
            Reason.DRAFTER_UNAVAILABLE,
            f"Workers serve without the drafter {uri}, slower and as well: {problem.rstrip('.')}. The next pod looks "
            "for it again.",
        )
    of, counted_on = _counted_on(revision.plan)
    measured = [dict(_measured(report, revision.plan)) for report in reports if report is not None]
    if any(report is not None and report.low_acceptance for report in reports):
        yield Warn(
            Reason.LOW_DRAFT_ACCEPTANCE,
            f"Under 5 % of what {names or 'prompt lookup'} proposes has been right for minutes: it is not the "
            "drafter of this model, or the text does not repeat itself. Answers are right all the same; without "
            "spec.drafter they cost less.",
        )
    elif min((each.get(of, 1.0) for each in measured), default=1.0) < _FAR_BELOW * counted_on:
        yield Warn(
            Reason.LOW_DRAFT_ACCEPTANCE,
            f"What {of} proposes is right less than half as often as the {counted_on:.2f} that the plan "
            "counts with: it is the drafter of another fine-tune, a worker hands it the wrong rows, or the text is of "
            "another kind. Answers are right all the same, at less than the expected speed.",
        )


def _counted_on(plan: PlanStatus) -> tuple[str, float]:
    """The drafter, and the chance of its drafts to be right, by which the plan expects its speed; 0.0: by none."""
    speeds = (each.speed for each in plan.candidates if each.verdict == "Chosen")
    drafts = next((speed.drafts for speed in speeds if speed is not None and speed.drafts), None)
    if drafts is None or plan.drafter is None:
        return "", 0.0
    return drafts.drafter or next((uri for uri, _ in plan.drafter.named), ""), float(drafts.acceptance)
