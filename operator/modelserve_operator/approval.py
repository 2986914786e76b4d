"""Which revision is committed: by the user's approval, by what was committed before, or by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from modelserve_operator.observed import moment
from modelserve_operator.revision import Revision


@dataclass(frozen=True)
class Choice:
    """`unknown`: an approval that names neither what is committed nor what is proposed."""

    committed: Revision | None
    unknown: str | None = None


def choose(
    known: Iterable[Revision], fresh: Revision | None, *, approvals: Iterable[str], automatic: bool, now: datetime
) -> Choice:
    """`known`: revisions that were committed for this very spec; `fresh`: what would be planned now.

    What was committed last stays, whatever nodes come and go, until an approval names another. An approval is a plan's
    hash, or a revision's where two share a plan: by the plan alone no new image or placement is approved.
    """
    newest = committed_last(known := tuple(known))
    unknown = None
    for approval in approvals:
        if newest is not None and _names(approval, newest):
            return Choice(newest)
        again = max((revision for revision in known if _names(approval, revision)), key=_order, default=None)
        if again is not None and newest is not None:
            return Choice(_recommitted(again, after=newest, now=now))
        if fresh is not None and _names(approval, fresh):
            return Choice(fresh)
        unknown = unknown or approval
    if newest is not None:
        return Choice(newest, unknown if fresh is not None and fresh.hash != newest.hash else None)
    return Choice(fresh if automatic else None, unknown)


def committed_last(known: Iterable[Revision]) -> Revision | None:
    """Of revisions of one spec, the one that runs until an approval names another."""
    return max(known, key=_order, default=None)


def _names(approval: str, revision: Revision) -> bool:
    return approval in (revision.hash, revision.plan.hash)


def _order(revision: Revision) -> tuple[str, str]:
    return revision.committed_at, revision.hash


def _recommitted(revision: Revision, *, after: Revision, now: datetime) -> Revision:
    """The revision as the one that was committed last."""
    before = moment(after.committed_at)
    at = max(now, before + timedelta(seconds=1)) if before is not None else now
    return replace(revision, committed_at=at.strftime("%Y-%m-%dT%H:%M:%SZ"), recommitted=True)
