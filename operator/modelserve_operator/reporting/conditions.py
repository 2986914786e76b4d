"""The conditions of a ModelServe, one function per type, from what was decided and observed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from modelserve.units import GIB
from modelserve_operator import labels
from modelserve_operator.observed.denials import denial
from modelserve_operator.observed.pod_health import stuck
from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.observed.terminal_failure import FailureRecord
from modelserve_operator.planning.decision import Finding
from modelserve_operator.planning.wanted import proposal_text
from modelserve_operator.reasons import ConditionType, Reason
from modelserve_operator.reporting.capacity_buffers import buffered
from modelserve_operator.reporting.reconciliation import Reconciliation
from modelserve_operator.reporting.routed import routed
from modelserve_operator.rollout import rivals


def conditions(view: Reconciliation) -> Iterator[tuple[ConditionType, Finding]]:
    """All conditions that exist now, in a fixed order; Reconciling and Stalled only while true."""
    stalled = _stalled(view)
    capacity = _capacity(view)
    workers = _workers(view)
    ready = _ready(view, stalled=stalled, workers=workers, capacity=capacity)
    if stalled is not None or not _settled(view):
        yield ConditionType.READY, ready
    yield ConditionType.AVAILABLE, _available(view)
    yield ConditionType.ACCEPTED, view.decision.accepted
    yield ConditionType.PLANNED, view.decision.planned
    yield ConditionType.CAPACITY_AVAILABLE, capacity
    yield ConditionType.WEIGHTS_LOADED, _weights(view)
    yield ConditionType.WORKERS_READY, workers
    buffer = buffered(view.observed, view.decision, view.running, view.refused_buffer)
    if buffer is not None:
        yield ConditionType.CAPACITY_BUFFERED, buffer
    if (lost := _lost(view)) is not None:
        yield ConditionType.POOLS_GONE, lost
    route = routed(view.observed, view.decision, view.refused_route)
    if route is not None:
        yield ConditionType.ROUTED, route
    if stalled is not None:
        yield ConditionType.STALLED, stalled
    elif not ready.ok and view.decision.planned.reason != Reason.WAITING_FOR_APPROVAL and not _settled(view):
        yield ConditionType.RECONCILING, Finding(True, ready.reason, ready.message)


def _settled(view: Reconciliation) -> bool:
    """Whether there is nothing to be ready: tools that have no Ready condition to look at take the object for current.

    So it is with previews, and with a plan that waits for its first approval, unless something runs beside them.
    """
    return view.decision.rests and not view.running


def _stalled(view: Reconciliation) -> Finding | None:
    decided, worker = view.decision.stalled, _stalled_worker(view)
    if decided is None or worker is None:
        return worker if decided is None else Finding(True, decided.reason, decided.message)
    return Finding(True, decided.reason, f"{decided.message.rstrip('.')}. Besides: {worker.message}")


def _stalled_worker(view: Reconciliation) -> Finding | None:
    target = view.target
    if target is None:
        return None
    short = target.ready < view.desired
    if short and target.record is not None and not (target.record.trying and target.fresh):
        return Finding(True, target.record.failure.reason, _failed_message(view, target.record))
    hanging = stuck(view.target_pods, view.observed.now)
    if short and hanging is not None:
        return Finding(True, hanging[0], _workers(view, about=hanging[1]).message)
    if short and view.decision.turn.again is None and (lost := _lost(view)) is not None:
        return lost
    if short and target.overdue and not target.unschedulable:
        return Finding(True, Reason.PROGRESS_DEADLINE_EXCEEDED, _workers(view).message)
    return None


def _lost(view: Reconciliation) -> Finding | None:
    """Where pods of the committed plan can never start again, with what would have them do so."""
    lost, proposed = view.decision.turn.lost, view.decision.proposed
    if lost is None or view.decision.target is None:
        return None
    remedy = "Nothing that is there fits in its place: add nodes of it, or allow others."
    if view.decision.turn.again is not None:
        remedy = "If that lasts, another plan is committed by spec.plan.replan."
    elif proposed is not None:
        remedy = proposal_text(view.observed.name, view.decision.target, proposed)
    return Finding(True, Reason.POOLS_GONE, f"{lost}. {remedy}")


def _failed_message(view: Reconciliation, record: FailureRecord) -> str:
    """What failed, what stays, and when it is tried again. It changes with attempts, not with time."""
    count = "once" if record.attempts <= 1 else f"{record.attempts} times in a row"
    again = f"next attempt at {record.retry_at:%Y-%m-%dT%H:%M:%SZ}, or at once when annotation {labels.RETRY} changes"
    if record.trying:
        again = "the next attempt is under way"
    name = labels.revision_name(view.observed.name, view.target.hash) if view.target else ""
    cause = record.failure.message.rstrip(".")
    return f"{cause}. Failed {count}; ready workers of {name} stay, it does not grow; {again}."


def _capacity(view: Reconciliation) -> Finding:
    target = view.target
    reason = view.decision.planned.reason if view.decision.planned.ok is False else Reason.NOT_REQUESTED
    lacking = reason in (Reason.DOES_NOT_FIT, Reason.NO_ACCELERATORS)
    if target is None or lacking:
        message = "No plan is committed" if target is None else "There is no room for what the spec asks for"
        return Finding(False if lacking else None, reason, f"{message}: see Planned.")
    if (lost := _lost(view)) is not None:
        return Finding(False, lost.reason, lost.message)
    if view.step.blocked:
        return Finding(False, Reason.NO_SURGE_CAPACITY, _blocked_message(view))
    if target.refused is not None and target.pods < target.replicas:
        message = f"{target.pods} of {target.replicas} pods exist: {target.refused}"
        return Finding(False, denial(target.refused), message)
    gated = [pod for pod in view.target_pods if pod.gated is not None]
    if gated:
        queued = sum(pod.queued for pod in gated)
        if queued:
            message = (
                f"{queued} of {view.desired} pods wait in Kueue's queue {_queue(view)} for quota: {gated[0].gated}"
            )
            return Finding(False, Reason.WAITING_FOR_QUOTA, message)
        message = f"{len(gated)} of {view.desired} pods wait for their scheduling gates: {gated[0].gated}"
        return Finding(False, Reason.SCHEDULING_GATED, message)
    pending = [pod for pod in view.target_pods if pod.unschedulable is not None]
    if pending:
        product = view.revision.plan.accelerator if view.revision is not None else ""
        message = f"{len(pending)} of {view.desired} pods wait for a node with {product}: {pending[0].unschedulable}"
        if view.decision.target and view.decision.proposed:
            proposal = proposal_text(view.observed.name, view.decision.target, view.decision.proposed)
            message = f"{message.rstrip('.')}. {proposal}"
        return Finding(False, Reason.WAITING_FOR_NODES, message)
    if sum(pod.placed for pod in view.target_pods) < view.step.replicas.get(target.hash, 0):
        return Finding(None, Reason.WAITING_FOR_NODES, "Not every pod has a node yet, and none is known to lack one.")
    return Finding(True, Reason.CAPACITY_SUFFICIENT, "Every pod that should run has a node.")


def _queue(view: Reconciliation) -> str:
    """Name of the LocalQueue that the spec puts its pods into."""
    spec = view.decision.spec
    return (spec.pod.labels.get(labels.QUEUE_NAME) if spec is not None else None) or "(not named in spec.pod.labels)"


def _blocked_message(view: Reconciliation) -> str:
    pending = next((pod.unschedulable for pod in view.target_pods if pod.unschedulable), None)
    why = pending or "rollout.maxSurge is 0 and rollout.allowDowntime is false"
    remedy = "add room for one more pod, or set rollout.allowDowntime to true"
    if view.observed.rivals:
        return f"The old revision {view.step.serve} stays: {rivals.told(view.observed.rivals)}; add room for them."
    if pending is None:
        remedy = "set rollout.maxSurge to 1 or more, or rollout.allowDowntime to true"
    return f"The old revision {view.step.serve} stays: {why}; {remedy}."


def _weights(view: Reconciliation) -> Finding:
    idle = _idle(view)
    if idle is not None:
        return idle
    # A worker that was once asked for its plan has loaded; readiness may come and go afterwards.
    loaded = sum(pod.ready or pod.uid in view.observed.reports for pod in view.target_pods)
    if loaded >= view.desired:
        return Finding(True, Reason.LOADED, f"{loaded} workers have loaded the model.")
    return Finding(False, Reason.LOADING, f"{loaded} of {view.desired} workers have loaded the model.")


def _workers(view: Reconciliation, *, about: Pod | None = None) -> Finding:
    """`about`: the pod whose trouble is told; the first that has any by default."""
    idle = _idle(view)
    if idle is not None:
        return idle
    ready = sum(pod.ready for pod in view.target_pods)
    if ready >= view.desired:
        reduced = _reduced_context(view)
        reason = Reason.CONTEXT_REDUCED if reduced else Reason.ALL_READY
        return Finding(True, reason, f"{ready} of {view.desired} workers are ready.{reduced}{_unheard(view)}")
    told = (about,) if about is not None else view.target_pods
    trouble = next((f" Pod {pod.name}, {pod.trouble}" for pod in told if pod.trouble), "")
    return Finding(False, Reason.STARTING, f"{ready} of {view.desired} workers are ready.{trouble}")


def _unheard(view: Reconciliation) -> str:
    """What is not known where ready workers cannot be asked."""
    silent = [pod.name for pod in view.target_pods if pod.uid in view.observed.silent]
    if not silent:
        return ""
    return (
        f" What {len(silent)} of them measured is not known: {min(silent)} does not answer the operator on /v1/plan; a "
        "NetworkPolicy may keep it out."
    )


def _reduced_context(view: Reconciliation) -> str:
    """What is lost where a ready worker serves a shorter context than planned; empty where none does."""
    plan = view.revision.plan if view.revision is not None else None
    reports = [view.observed.reports[pod.uid] for pod in view.target_pods if pod.uid in view.observed.reports]
    shortest = min(reports, key=lambda report: report.max_model_len, default=None)
    if plan is None or plan.max_model_len is None or shortest is None or shortest.max_model_len >= plan.max_model_len:
        return ""
    pool = ""
    if shortest.measured is not None and plan.per_gpu is not None:
        missing = plan.per_gpu.kv_pool_bytes - shortest.measured.kv_pool_bytes
        pool = f", because the KV pool is {missing / GIB:.2f} GiB per GPU smaller than planned"
    least = plan.engine.min_model_len if plan.engine else 1
    return (
        f" They serve {shortest.max_model_len:,} tokens instead of the planned {plan.max_model_len:,}{pool}; "
        f"context.minModelLen allows down to {least:,}."
    )


def _idle(view: Reconciliation) -> Finding | None:
    """Why there are no workers to speak of."""
    target = view.target
    if target is None:
        return Finding(None, Reason.NOT_REQUESTED, "No plan is committed, so no worker is wanted.")
    if view.desired == 0:
        return Finding(True, Reason.SCALED_TO_ZERO, "spec.replicas is 0.")
    if target.failing and target.record is not None and target.ready < view.desired:
        message = f"{target.ready} of {view.desired} workers are ready; growth stopped: {target.record.failure.message}"
        return Finding(False, Reason.STOPPED, message)
    return None


def _available(view: Reconciliation) -> Finding:
    ready = view.serving_ready
    if ready:
        of = "both revisions" if view.step.shared else f"revision {view.step.serve}"
        return Finding(True, Reason.SERVING, f"{ready} workers of {of} take requests.")
    if view.desired == 0 and view.decision.spec is not None:
        return Finding(False, Reason.SCALED_TO_ZERO, "No worker takes requests.")
    waiting = sum(pod.ready for pod in view.observed.workers)
    why = f": {waiting} are ready, but Service {view.observed.name} has no endpoint of theirs" if waiting else ""
    return Finding(False, Reason.NOT_SERVING, f"No worker takes requests{why}.")


def _surplus_message(view: Reconciliation) -> str:
    waits = (pod for pod in view.target_pods if not pod.ready)
    return next((f"pod {pod.name}, {why}" for pod in waits if (why := pod.unschedulable or pod.trouble)), "wait.")


def _ready(view: Reconciliation, *, stalled: Finding | None, workers: Finding, capacity: Finding) -> Finding:
    planned = view.decision.planned
    if stalled is not None:
        return Finding(False, stalled.reason, stalled.message)
    if not planned.ok or view.revision is None:
        return Finding(False, planned.reason, planned.message)
    if view.write_failure is not None:
        return view.write_failure
    if view.complete and view.serving_ready < view.desired:
        message = f"{view.serving_ready} of {view.desired} workers are behind Service {view.observed.name}."
        return Finding(False, Reason.ROLLING_OUT, message)
    if view.complete and view.target is not None and view.target.surplus_unready:
        message = f"Its Deployment replaces pods, and a new one is not ready: {_surplus_message(view)}"
        return Finding(False, Reason.ROLLING_OUT, message)
    if view.complete:
        revision = labels.revision_name(view.observed.name, view.revision.hash)
        reason = Reason.SCALED_TO_ZERO if view.desired == 0 else Reason.ROLLED_OUT
        return Finding(True, reason, f"Revision {revision} is rolled out: {workers.message}")
    if capacity.ok is False:
        return Finding(False, capacity.reason, capacity.message)
    return Finding(False, Reason.ROLLING_OUT, workers.message)
