"""Which revision is committed: by the user's approval, by what was committed before, or by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelserve_operator.revisions.revision import Revision


@dataclass(frozen=True)
class Choice:
    """`revision`: what runs; `unknown`: an approval that names neither what is committed nor what is proposed."""

    revision: Revision | None
    unknown: str | None = None


def choose(
    committed: Iterable[Revision], proposed: Iterable[Revision], *, approvals: Iterable[str], automatic: bool
) -> Choice:
    """Of revisions that are committed for this very spec, and of those that could be, the one that runs. In mode
    Automatic the first of what is proposed takes no approval.

    What was committed last stays, whatever nodes come and go, until an approval names another. An approval is a plan's
    hash, or a revision's where two share a plan: by the plan alone no new image or placement is approved.
    """
    newest = latest(committed := tuple(committed))
    proposed = tuple(proposed)
    unknown = None
    for approval in approvals:
        if newest is not None and names(approval, newest):
            return Choice(newest)
        again = latest(revision for revision in committed if names(approval, revision))
        if again is not None:
            return Choice(again)
        new = next((revision for revision in proposed if names(approval, revision)), None)
        if new is not None:
            return Choice(new)
        unknown = unknown or approval
    if newest is not None:
        differs = any(revision.runs != newest.runs for revision in proposed)
        return Choice(newest, unknown if differs else None)
    return Choice(proposed[0] if automatic and proposed else None, unknown)


def latest(committed: Iterable[Revision]) -> Revision | None:
    """Of revisions of one spec, the one that runs until an approval names another."""
    return max(committed, key=lambda revision: revision.number, default=None)


def names(approval: str, revision: Revision) -> bool:
    """What was approved stays so when another worker runs it by the policy of the spec."""
    return approval in (revision.hash, revision.plan.hash, *revision.provenance.moved_from)
