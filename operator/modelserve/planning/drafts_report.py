"""What proposes tokens in a plan, as status shows it: which drafters, how often they were right, what they bring."""

from __future__ import annotations

from typing import Any

from modelserve.api.drafter import DrafterPlan, PlannedDrafter
from modelserve.api.speed import ExpectedDrafts
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.drafters.reading import drafter_kind
from modelserve.planning.evaluation import Fit
from modelserve.planning.speed.expected_speed import Speed, speed
from modelserve.planning.wishes import Wishes

SOURCES = {"Given": "as workload.draftAcceptance says", "Measured": "as workers measured", "Assumed": "assumed"}


def planned_drafter(fit: Fit, wishes: Wishes) -> DrafterPlan | None:
    """What the plan has propose tokens: as asked, as far as the candidate can."""
    drafts, has = wishes.drafts, fit.speculation
    if drafts is None or not has.num_tokens:
        return None
    kept = drafts.kept(has).drafters
    alone = kept[0].named if len(kept) == 1 else None
    several = tuple(
        PlannedDrafter(kind=drafter_kind(each.architecture), uri=each.named.uri, revision=each.named.revision)
        for each in kept
    )
    return DrafterPlan(
        uri=alone.uri if alone is not None else None,
        revision=alone.revision if alone is not None else None,
        models=several if len(several) > 1 else None,
        prompt_lookup=True if has.prompt_lookup else None,
        num_speculative_tokens=has.num_tokens if drafts.fixed else None,
    )


def measured_acceptance(wishes: Wishes) -> dict[str, Any]:
    """Chances of drafts that workers of the pair had told, as fields of PlanStatus; also where the chosen candidate
    does without."""
    if wishes.drafts is None:
        return {}
    several = len(wishes.drafts.drafters) > 1
    known = {each.named.uri: f"{each.chance:.2f}" for each in wishes.drafts.drafters if each.source == "Measured"}
    if several:
        return {"draft_acceptances": known} if known else {}
    return {"draft_acceptance": next(iter(known.values()), None)}


def drafts_status(expected: Speed, fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> ExpectedDrafts | None:
    """What drafts bring, beside the speed without them; None where none are planned, or nobody knows."""
    if expected.drafts is None or wishes.drafts is None:
        return None
    without = speed(fit, architecture, wishes.without_drafts)
    drafts = wishes.drafts.kept(fit.speculation)
    asked = drafts.drafters[expected.drafts.drafter] if drafts.drafters else None
    return ExpectedDrafts(
        acceptance=f"{drafts.chances[expected.drafts.drafter][0]:.2f}",
        source=asked.source if asked is not None else "Given",
        drafter=asked.named.uri if asked is not None and len(drafts.drafters) > 1 else None,
        per_request=expected.drafts.drafts,
        tokens_per_step=f"{expected.drafts.tokens:.2f}",
        time_per_output_token_ms=f"{without.at_load.output_token.seconds * 1e3:.2f}",
        output_tokens_per_second=f"{without.output_tokens_per_s:.1f}",
    )


def drafts_text(fit: Fit, architecture: ModelArchitecture, wishes: Wishes, with_drafts: Speed) -> str:
    """What proposes tokens, and what that is expected to bring."""
    drafter = planned_drafter(fit, wishes)
    if drafter is None:
        return ""
    by = [" or ".join(uri for uri, _ in drafter.named)] if drafter.named else []
    by += ["repetitions of a request's own tokens"] if drafter.prompt_lookup else []
    text = f"up to {fit.speculation.num_tokens} tokens at a time are proposed by {' and '.join(by)}"
    expected = drafts_status(with_drafts, fit, architecture, wishes)
    if expected is None:
        return f"{text}; what that brings depends on the text, and is in no expected time"
    of = f" by {expected.drafter}" if expected.drafter is not None else ""
    return (
        f"{text}; of those verified, {expected.per_request} of each request{of}, the first is right with a chance of "
        f"{expected.acceptance} ({SOURCES[expected.source]}): {expected.tokens_per_step} tokens a step, "
        f"{with_drafts.at_load.output_token.seconds * 1e3:.1f} ms a token instead of "
        f"{float(expected.time_per_output_token_ms):.1f}"
    )
