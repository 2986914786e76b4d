"""Says in sentences what an apply would come to: the choice first, then what is short and what would help. Pure.

It is the operator's own decision about the object as it would be, beside the one about the object as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from modelserve.api import Candidate, ModelServeSpec, PlanStatus
from modelserve.planning.changes import placed_on, plan_changes
from modelserve.units import GIB
from modelserve_operator import labels
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Decision
from modelserve_operator.planning.plan import decide
from modelserve_operator.planning.replan import same_plan
from modelserve_operator.planning.wanted import approve_command
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.settings import Settings

MOST_OTHERS = 6  # candidates beside the chosen one


def preview(after: Observed, before: Observed | None, settings: Settings) -> Iterator[str]:
    """Sentences about the object `after` it is applied; `before`: as it is now, None where it is new."""
    wanted = decide(after, settings)
    was = decide(before, settings) if before is not None else None
    if not wanted.accepted.ok:
        yield f"Accepted, and not served: {wanted.accepted.message}"
        return
    running = was.target if was is not None else None
    yield from _choice(wanted, running, after, _replicas(was, wanted))
    yield from (each.message for each in wanted.warnings)


def _replicas(was: Decision | None, wanted: Decision) -> tuple[int, int] | None:
    """(before, after), where they differ."""
    if was is None or was.spec is None or wanted.spec is None or was.spec.replicas == wanted.spec.replicas:
        return None
    return was.spec.replicas, wanted.spec.replicas


def _choice(
    wanted: Decision, running: Revision | None, after: Observed, replicas: tuple[int, int] | None
) -> Iterator[str]:
    spec, target = wanted.spec, wanted.target
    assert spec is not None
    if target is None and wanted.proposed is not None:
        waiting = wanted.proposed.plan
        verb = "previewed" if wanted.planned.reason == Reason.PLAN_PREVIEWED else "waits for approval"
        yield from _plan(f"Plan {waiting.hash} {verb}", waiting)
        if running is not None:
            yield from _difference(running.plan, waiting)
        if wanted.planned.reason == Reason.WAITING_FOR_APPROVAL:
            yield f"To commit it: {approve_command(after.name, waiting.hash or '')}"
        return
    if target is None and wanted.plan is not None and wanted.plan.fits:
        yield from _plan("Previewed, nothing is started", wanted.plan)
        yield from _others(wanted.plan)
        return
    if target is None:
        yield from _nothing(wanted, running, after)
        return
    if running is None:
        yield from _plan("Plan", target.plan)
    else:
        yield from _transition(running, target, spec, after)
    if replicas is not None:
        yield f"Replicas {replicas[0]} -> {replicas[1]}, each on {placed_on(target.plan)}."
    if wanted.turn.lost is not None:
        yield f"{wanted.turn.lost}."
    if running is None and wanted.plan is not None:
        yield from _others(wanted.plan)
    if wanted.proposed is not None:
        newer = wanted.proposed
        approve = newer.hash if newer.plan.hash == target.plan.hash else newer.plan.hash or newer.hash
        yield f"Proposed beside it: plan {approve} on {placed_on(newer.plan)}; it waits for approval."
        yield from _difference(target.plan, newer.plan)


def _transition(running: Revision, target: Revision, spec: ModelServeSpec, after: Observed) -> Iterator[str]:
    """What becomes of the pods that run."""
    old, new = (labels.revision_name(after.name, each.hash) for each in (running, target))
    if running.hash == target.hash:
        yield f"No new pods: revision {old} stays, on {placed_on(target.plan)}."
        return
    back = ", back to an earlier revision" if target.hash in after.history.stored else ""
    if same_plan(running, target, spec):
        yield f"New pods with the same plan{back}, on {placed_on(target.plan)}."
        yield f"Revision {new} replaces {old}."
    else:
        yield f"Re-plan{back}: {placed_on(target.plan)} a replica."
        yield f"Revision {new} replaces {old}."
        yield from _difference(running.plan, target.plan)
        yield from _memory(target.plan)
    surge = spec.rollout.max_surge
    if spec.replicas and surge:
        pods = "1 pod more needs" if surge == 1 else f"up to {surge} pods more need"
        yield f"While it rolls out, {pods} room (rollout.maxSurge)."
    elif spec.replicas:
        yield (
            "Old pods stop before new ones start (rollout.maxSurge 0)."
            if spec.rollout.allow_downtime
            else "Nothing is replaced while rollout.maxSurge is 0 and rollout.allowDowntime is false."
        )


def _plan(head: str, plan: PlanStatus) -> Iterator[str]:
    """The choice in one sentence, and its memory in another."""
    at = f", {plan.concurrency.at_max} of them at once" if plan.concurrency else ""
    yield f"{head}: {placed_on(plan)} a replica, for requests of up to {plan.max_model_len or 0:,} tokens{at}."
    yield from _memory(plan)


def _memory(plan: PlanStatus) -> Iterator[str]:
    memory, cache = plan.per_gpu, plan.kv_cache
    if memory is not None and cache is not None:
        yield (
            f"{'A GPU' if plan.gpus_per_replica else 'The container'}: weights {memory.weights_bytes / GIB:.2f}, "
            f"workspace {memory.activation_bytes / GIB:.2f}, overhead {memory.overhead_bytes / GIB:.2f}, KV pool "
            f"{memory.kv_pool_bytes / GIB:.2f} GiB ({cache.dtype} {cache.layout})."
        )


def _difference(before: PlanStatus, after: PlanStatus) -> Iterator[str]:
    changes = list(plan_changes(before, after))
    if changes:
        yield f"It changes: {'; '.join(changes)}."


def _nothing(wanted: Decision, running: Revision | None, after: Observed) -> Iterator[str]:
    """No plan: why, what is missing where, and what would help."""
    planned = wanted.planned
    refused = wanted.plan.candidates if wanted.plan is not None else ()
    if planned.reason == Reason.INSPECTING_MODEL:
        yield "No plan yet: this model is not known, and a Job reads its geometry first."
    elif planned.reason == Reason.DOES_NOT_FIT:
        yield "No plan fits now. The object is accepted, and planned again when nodes change."
    else:
        yield f"No plan now: {planned.message}"
    if running is not None:
        yield f"Revision {labels.revision_name(after.name, running.hash)} on {placed_on(running.plan)} stays meanwhile."
    yield from _shortfalls(refused)


def _others(plan: PlanStatus) -> Iterator[str]:
    """Candidates that were not chosen: those that fit as well, and what the others lack."""
    others = [each for each in plan.candidates if each.verdict == "Fits"]
    for each in islice(others, MOST_OTHERS):
        held = f", {each.concurrency.at_max} at once" if each.concurrency else ""
        yield f"Fits as well: {_label(each)}, {each.max_model_len or 0:,} tokens{held}."
    yield from _shortfalls(plan.candidates)


def _shortfalls(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    refused = [each for each in candidates if each.verdict == "Refused"]
    for each in islice(refused, MOST_OTHERS):
        yield f"{_label(each)}: {each.message or each.limited_by}."
        if each.remedy:
            yield f"{_label(each)}: {each.remedy}."


def _label(candidate: Candidate) -> str:
    gpus = candidate.gpus_per_replica
    return f"{gpus} x {candidate.accelerator}" if gpus else candidate.accelerator
