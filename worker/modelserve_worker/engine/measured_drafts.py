"""Counts how many of a worker's drafts were right, for /v1/plan."""

from __future__ import annotations

from modelserve.measured_drafts import MeasuredDrafts
from modelserve_worker.scheduling.stats import EngineStats

LEAST_PROPOSALS = 1000  # fewer say little of the texts to come


def measured_drafts(stats: EngineStats, *, problem: str | None) -> MeasuredDrafts | None:
    """None where nothing proposes tokens, nor was to. `problem`: why the drafter that was asked for is not there."""
    if not stats.accepted_per_position and problem is None:
        return None
    known = stats.proposals_judged_total >= LEAST_PROPOSALS
    each = tuple(
        round(share, 2) if judged >= LEAST_PROPOSALS else None
        for judged, share in zip(stats.judged_by_drafter, stats.acceptance_by_drafter, strict=True)
    )
    return MeasuredDrafts(
        problem=problem[:2048] if problem else None,
        low_acceptance=stats.low_acceptance,
        acceptance=round(stats.draft_acceptance, 2) if known else None,
        acceptances=each if len(each) > 1 else None,
    )
