"""Whether a committed plan gives way to another one by itself, or a revision that came so to the one before. Pure.

By default it never does: other plans are proposed. Where spec.plan.replan asks for it, what is remembered lies in
objects: since when pools are gone in the condition PoolsGone, that a revision replaced another one by itself in its
ControllerRevision, and that it was given up again in an annotation of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from modelserve.api import Candidate, ModelServeSpec, PlanStatus
from modelserve.api.plan_policy import ReplanSpec
from modelserve.planning import AcceleratorOffer, plan_hash
from modelserve.planning.changes import cost_per_hour, placed_on, plan_changes
from modelserve.planning.pools.pinning import besides_architecture
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.approval import names
from modelserve_operator.planning.revision_builder import offers_for
from modelserve_operator.reasons import ConditionType, Reason
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout.next_step import RunningRevision
from modelserve_operator.rollout.running import running_revisions


@dataclass(frozen=True)
class Turn:
    """`commit`: what takes the place of the committed revision now, with `reason` and `why`, for people.

    `lost`: why pods of the committed plan can never start again, where that is so. `undone`: hash of the revision that
    is given up by this turn. `again`: seconds until it may look different without an event.
    """

    commit: Revision | None = None
    reason: Reason | None = None
    why: str = ""
    lost: str | None = None
    undone: str = ""
    again: float | None = None


STAYS = Turn()


def replan(
    spec: ModelServeSpec,
    committed: Revision,
    proposed: Revision | None,
    observed: Observed,
    *,
    approvals: Iterable[str],
) -> Turn:
    """`proposed`: what would be committed now, None where nothing fits; `approvals`: hashes that people approved."""
    policy, history = spec.plan.replan, observed.history
    turn = Turn(lost=pools_gone(spec, committed, proposed, observed))
    if policy is None or spec.plan.mode != "Automatic" or any(names(each, committed) for each in approvals):
        return turn
    running = running_revisions(observed, replicas=spec.replicas, rollout=spec.rollout)
    replaced = next((each for each in history.revisions if each.hash == committed.provenance.replanned_from), None)
    if replaced is not None and not committed.undone and _stalls(running.get(committed.hash)):
        serving = running.get(replaced.hash)
        if serving is not None and serving.ready:
            old, new = (labels.revision_name(observed.name, each.hash) for each in (replaced, committed))
            why = (
                f"{new} stalls while {old} serves, so {old} is committed again. For these inputs of the plan nothing "
                "is re-planned by itself any more; other plans are proposed."
            )
            return replace(
                turn, commit=replaced, reason=Reason.REPLAN_UNDONE, why=why, undone=committed.hash, lost=None
            )
    inputs = committed.inputs.plan if committed.inputs is not None else None
    if any(each.undone and each.inputs is not None and each.inputs.plan == inputs for each in history.revisions):
        return turn
    if proposed is None or same_plan(committed, proposed, spec):
        return turn
    if turn.lost is not None:
        left = _left(policy, observed)
        if left > timedelta():
            return replace(turn, again=left.total_seconds())
        return _commit(committed, proposed, observed, f"its pools have been gone for {policy.settle_seconds} s")
    if policy.when == "Better" and _serves_alone(committed, running, observed):
        gained = gain_percent(spec, committed.plan, proposed.plan)
        if (
            gained is not None
            and gained >= policy.least_gain_percent
            and committed.worker.image == proposed.worker.image
        ):
            what = (
                f"{_MEASURE[spec.objective or 'Throughput']} gain {gained:.0f} % (least {policy.least_gain_percent} %)"
            )
            return _commit(committed, proposed, observed, what)
    return turn


def _commit(committed: Revision, proposed: Revision, observed: Observed, reason: str) -> Turn:
    """The turn to today's plan; a revision of its hash that is kept keeps what it says of itself."""
    kept = next((each for each in observed.history.revisions if each.hash == proposed.hash), None)
    made = replace(proposed, provenance=replace(proposed.provenance, replanned_from=committed.hash))
    old, new = (labels.revision_name(observed.name, each.hash) for each in (committed, proposed))
    changes = "; ".join(plan_changes(committed.plan, proposed.plan)) or "other places for the same plan"
    why = f"{new} replaces {old} by spec.plan.replan: {reason}. It changes: {changes}."
    return Turn(commit=kept or made, reason=Reason.REPLANNED, why=why)


def pools_gone(spec: ModelServeSpec, committed: Revision, proposed: Revision | None, observed: Observed) -> str | None:
    """Why pods of the committed plan cannot start any more: nothing there offers what they ask for.

    A product that the spec names may still come, from an autoscaler that publishes nothing: it counts as gone where
    another one is planned in its place now.
    """
    plan = committed.plan
    if not plan.gpus_per_replica or any(_offers(each, plan) for each in offers_for(spec, observed.supply)):
        return None
    named = spec.accelerators.products if spec.accelerators and spec.accelerators.products else ()
    if plan.accelerator in named and (proposed is None or proposed.plan.accelerator == plan.accelerator):
        return None
    return (
        f"No node and no declared pool offers {placed_on(plan)} any more, which plan {plan.hash} is for: pods of it "
        "that end cannot start again"
    )


def _offers(offer: AcceleratorOffer, plan: PlanStatus) -> bool:
    same = (offer.accelerator.product, offer.resource_name) == (plan.accelerator, plan.resource_name)
    return same and not offer.refused and offer.largest_replica >= (plan.gpus_per_replica or 0)


def _left(policy: ReplanSpec, observed: Observed) -> timedelta:
    """How long the pools have yet to be gone."""
    told = (observed.model_serve.get("status") or {}).get("conditions") or ()
    since = next(
        (each.get("lastTransitionTime") for each in told if each.get("type") == ConditionType.POOLS_GONE), None
    )
    settle = timedelta(seconds=policy.settle_seconds)
    if since is None:
        return settle
    return datetime.fromisoformat(str(since)) + settle - observed.now


def _stalls(running: RunningRevision | None) -> bool:
    """Whether a revision has failed: none of its workers is ready, and those that were started ended or hang."""
    if running is None or running.ready or running.unschedulable:
        return False
    return running.failing or running.overdue


def _serves_alone(committed: Revision, running: Mapping[str, RunningRevision], observed: Observed) -> bool:
    """Whether nothing rolls out: what is changing already is not changed once more."""
    own = running.get(committed.hash)
    return own is not None and own.ready > 0 and len(running) == 1 and observed.selected == committed.hash


def same_plan(one: Revision, other: Revision, spec: ModelServeSpec) -> bool:
    """Whether two revisions run the same plan in the same places, whatever the release and the image of the worker."""
    hashes = {plan_hash(each.plan, spec, engine_version="") for each in (one, other)}
    return len(hashes) == 1 and (
        besides_architecture(one.plan.node_selector_terms) == besides_architecture(other.plan.node_selector_terms)
    )


_MEASURE = {
    "Throughput": "output tokens per second and GPU",
    "Latency": "times per output token",
    "MaxContext": "tokens of context",
    "Cost": "prices",
}


def gain_percent(spec: ModelServeSpec, before: PlanStatus, after: PlanStatus) -> Decimal | None:
    """By how much the plan `after` is better by the objective of the spec; None where it cannot be told.

    Figures of the plan `before` are those that today's candidates have for it, where it is among them: constants of a
    release and speeds that were measured since are no gain.
    """
    chosen = _chosen(after)
    now = next((each for each in after.candidates if _is_of(each, before) and each.verdict != "Refused"), None)
    held = now or _chosen(before)
    if chosen is None or held is None:
        return None
    if spec.objective == "Cost":
        prices = [Decimal(each.cost_per_hour) if each.cost_per_hour else None for each in (held, chosen)]
        prices[0] = prices[0] or cost_per_hour(before)
        return _more(prices[0], prices[1])
    if spec.objective == "MaxContext":
        return _more(Decimal(chosen.max_model_len or 0), Decimal(held.max_model_len or 0))
    if chosen.speed is None or held.speed is None:
        return None
    if spec.objective == "Latency":
        return _more(Decimal(held.speed.time_per_output_token_ms), Decimal(chosen.speed.time_per_output_token_ms))
    new, old = (Decimal(each.speed.output_tokens_per_second) / max(1, each.gpus_per_replica)
                for each in (chosen, held) if each.speed)  # fmt: skip
    return _more(new, old)


def _more(one: Decimal | None, other: Decimal | None) -> Decimal | None:
    """By how many percent one is more than the other."""
    return None if not one or not other else 100 * (one / other - 1)


def _chosen(plan: PlanStatus) -> Candidate | None:
    return next((each for each in plan.candidates if each.verdict == "Chosen"), None)


def _is_of(candidate: Candidate, plan: PlanStatus) -> bool:
    return (candidate.accelerator, candidate.gpus_per_replica) == (plan.accelerator, plan.gpus_per_replica)
