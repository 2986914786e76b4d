"""What is decided about one ModelServe, as `plan` decides it and everything behind it reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve_operator.planning.replan import STAYS, Turn
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.sources import ModelSource


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
    drafters: tuple[tuple[ModelSource, AssistantFacts | None], ...] = ()  # to be read, and what they were found to be
    inspect: tuple[ModelSource, ...] = ()  # whose inspect Jobs should exist
    plan: PlanStatus | None = None  # for status.plan
    proposed: Revision | None = None  # for status.proposedPlan
    target: Revision | None = None
    move: Revision | None = None  # what a rolling update of workers would commit, in its turn
    waits: str | None = None  # for status.waits: what of the proposal is another one
    warnings: tuple[Warn, ...] = ()  # what is amiss beside the spec, at the head of the Planned message
    stalled: Finding | None = None
    turn: Turn = STAYS  # of a committed plan to another one by itself

    def warned(self, *warnings: Warn) -> Decision:
        """The decision with more that is amiss."""
        return replace(self, warnings=(*self.warnings, *warnings))

    @property
    def rests(self) -> bool:
        """Nothing changes until the user says so: a preview, or a plan that waits for approval."""
        return self.planned.reason in (Reason.PLAN_PREVIEWED, Reason.WAITING_FOR_APPROVAL)


NOT_PLANNED = Finding(None, Reason.BLOCKED, "The spec was not accepted.")
