"""The heartbeat of the operator: gather, decide, build, apply, report. One function, safe to run at any moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.cluster.store import shown_speed
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.learning.calibration import measurement
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.learning.speed_calibration import speed_factors
from modelserve_operator.observed.inspection import seconds_left
from modelserve_operator.observed.pod_health import patience_left
from modelserve_operator.observed.snapshot import Observed, Pod, WorkerReport
from modelserve_operator.planning.decision import Decision
from modelserve_operator.planning.drafters import acceptance_of, waits_for_commits
from modelserve_operator.planning.plan import decide, moving, waiting_to_move
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reasons import Reason
from modelserve_operator.reporting import resource_metrics
from modelserve_operator.reporting.capacity_buffers import RefusedBuffer
from modelserve_operator.reporting.conditions import View
from modelserve_operator.reporting.routed import RefusedRoute
from modelserve_operator.reporting.status import summarise, transitions
from modelserve_operator.reporting.write_failures import (
    REFUSED_SECONDS,
    WriteFailure,
    contested,
    name_taken,
    refused,
    unfit,
)
from modelserve_operator.rollout import disruption
from modelserve_operator.rollout.fleet import Limits, turn
from modelserve_operator.rollout.next_step import RunningRevision, Step, kept, next_step
from modelserve_operator.rollout.rivals import gives_away
from modelserve_operator.rollout.running import known_revisions, replacements, running_revisions
from modelserve_operator.settings import Settings
from modelserve_operator.sources import surges_first
from modelserve_operator.writing.apply import (
    Applier,
    NameTakenError,
    PredecessorError,
    StatusOvertakenError,
    UnfitError,
    WriteError,
)
from modelserve_operator.writing.buffer_writer import CapacityBuffers
from modelserve_operator.writing.children import Children
from modelserve_operator.writing.drift import DriftContestedError
from modelserve_operator.writing.gateway_routes import GatewayRoutes
from modelserve_operator.writing.halted_moves import HaltedMoves
from modelserve_operator.writing.status_contest import StatusContestedError

logger = logging.getLogger(__name__)

PREDECESSOR_SECONDS, RIVALS_SECONDS = 2.0, 15.0
NEXT_TURN_SECONDS, LOOKS_PER_SECOND = 15.0, 10  # whether a move to a newer worker may begin: of one, of all together


class Reconciler:
    """Holds the doors; every call of `reconcile` starts from what is observed, not from what an earlier call knew."""

    def __init__(self, gatherer: Gatherer, applier: Applier, shared: SharedConfig, settings: Settings) -> None:
        self._gatherer = gatherer
        self._applier = applier
        self._children = Children(applier, settings)
        self._buffers = CapacityBuffers(applier, settings)
        self._routes = GatewayRoutes(applier)
        self._shared = shared
        self._settings = settings
        self._halted = HaltedMoves(gatherer, applier, settings)
        self._admitted: dict[Key, str] = {}  # moves that the store may not show yet, and to which image
        self._learning = asyncio.Lock()  # what is learned is one object for all ModelServes

    async def reconcile(self, key: Key) -> float | None:
        """Bring one ModelServe a step nearer to its spec. Raises KubeError for the queue to retry.

        Every write that fails is said in the status, and those that failed for good are tried again after a while.

        1. gather: the object, its children, the pools, the workers' reports
        2. decide: is the spec acceptable, what is the model, which revision is wanted
        3. next_step: which revisions run with how many replicas, which one serves
        4. apply: children first (the Service before an old revision goes), the status last
        """
        observed = await self._gatherer.observe(key)
        if observed is None or observed.model_serve["metadata"].get("deletionTimestamp"):
            resource_metrics.forget(*key)
            self._applier.forget(key)
            self._admitted.pop(key, None)
            self._halted.note(key, None)
            return None  # the garbage collector deletes the children
        self._applier.note_retry(key, labels.annotation_of(observed.model_serve, labels.RETRY))
        decision = self._in_turn(key, decide(observed, self._settings), observed.now)
        await self._halted.tell()
        replicas = _replicas(observed, decision)
        running = running_revisions(
            observed, replicas=replicas, rollout=decision.spec.rollout if decision.spec else None
        )
        step = _step(observed, decision, running, replicas=replicas)
        target = decision.target
        if target is not None and gives_away(step, running, target=target.hash, replicas=replicas or 0):
            observed = replace(observed, rivals=await self._gatherer.pending_pods.rivals(observed, target))
            step = _step(observed, decision, running, replicas=replicas)
        await self._prefer_to_delete(observed, step, running)
        delays = [_next_attempt(observed, running), patience_left(observed.pods, observed.now), observed.ask_again]
        delays += [
            seconds_left(observed, labels.inspection_name(observed.name, source.hash)) for source in decision.inspect
        ]
        if observed.rivals:  # no event tells when they go
            delays.append(RIVALS_SECONDS)
        if decision.accepted.reason == Reason.VOLUME_NOT_SHAREABLE:  # no event tells when the claim is made anew
            delays.append(REFUSED_SECONDS)
        delays.append(decision.turn.again)
        if decision.move is not None:
            delays.append(max(NEXT_TURN_SECONDS, len(self._gatherer.fleet()) / LOOKS_PER_SECOND))
        refused_route = await self._routes.apply(observed, decision, step)
        stays = refused_route is not None and refused_route.selects_others
        failed = await self._children.apply(observed, decision, step, running, all_stay=stays)
        delays.append(await self._hold(observed, replicas))
        refused_buffer = await self._buffers.apply(observed, decision, running)
        if refused_buffer is not None or refused_route is not None:
            delays.append(REFUSED_SECONDS)
        if isinstance(failed, PredecessorError):
            logger.info("%s/%s waits for the garbage collector: %s", *key, failed)
            return PREDECESSOR_SECONDS
        failure = _explained(failed, now=observed.now)
        if failure is not None and failure.delay is not None:
            decision = _stalled_by(decision, failure)
            delays.append(failure.delay)
        try:
            await self._report(observed, decision, step, running, failure, refused_buffer, refused_route)
        except StatusOvertakenError as error:
            logger.debug("%s/%s is reconciled again: %s", *key, error)
            return 0.0
        except StatusContestedError as error:
            delays.append(error.delay)
        if failed is not None and (failure is None or failure.delay is None):
            raise failed
        return min((delay for delay in delays if delay is not None), default=None)

    def _in_turn(self, key: Key, decision: Decision, now: datetime) -> Decision:
        """The decision with its move to another worker, where it may move now; nothing is awaited meanwhile."""
        if decision.move is None:
            self._admitted.pop(key, None)
            self._halted.note(key, None)
            return decision
        settings, image = self._settings, decision.move.worker.image
        patience = timedelta(seconds=settings.rolling_patience_seconds)
        limits = Limits(settings.rolling_budget, settings.rolling_failures, patience)
        waits = turn(self._gatherer.fleet(), key=key, image=image, admitted=self._admitted, limits=limits, now=now)
        self._halted.note(key, waits.halted if waits is not None else None)
        if waits is not None:
            return waiting_to_move(decision, waits.why)
        self._admitted[key] = image
        return moving(decision)

    async def _prefer_to_delete(self, observed: Observed, step: Step, running: Mapping[str, RunningRevision]) -> None:
        """Where a Deployment is about to shrink, have those of its pods go that have to leave their node anyway."""
        if not surges_first(observed.model_serve):
            return
        shrinking = {
            each for each, wanted in step.replicas.items() if each in running and running[each].replicas > wanted
        }
        for pod in observed.workers:
            if pod.uid in observed.to_move and pod.plan_hash in shrinking:
                await self._applier.prefer_to_delete(observed.namespace, pod.name)

    async def _hold(self, observed: Observed, replicas: int | None) -> float | None:
        """Have autoscalers spare the workers that they should; what cannot be written stops nothing. Seconds until the
        next try.
        """
        for pod, changed in disruption.changes(observed, replicas=replicas):
            try:
                await self._applier.reannotate(Key(observed.namespace, pod.name), changed)
            except KubeError as error:
                logger.info("%s/%s is not told to autoscalers: %s", observed.namespace, pod.name, error)
                return REFUSED_SECONDS
        return None

    async def _report(
        self,
        observed: Observed,
        decision: Decision,
        step: Step,
        running: dict[str, RunningRevision],
        failure: WriteFailure | None,
        refused_buffer: RefusedBuffer | None,
        refused_route: RefusedRoute | None,
    ) -> None:
        """Write the status and announce what is new in it."""
        asked = _replicas(observed, decision)
        desired = sum(revision.replicas for revision in running.values()) if asked is None else asked
        view = View(
            observed,
            decision,
            step,
            running,
            replicas=desired,
            asked=asked,
            revisions=known_revisions(observed),
            refused_buffer=refused_buffer,
            refused_route=refused_route,
            write_failure=failure.finding if failure is not None and failure.delay is None else None,
        )
        status = summarise(view)
        nothing_wanted = decision.rests and not running
        resource_metrics.show(observed.namespace, observed.name, status, desired=0 if nothing_wanted else desired)
        await self._learn(observed, decision, shown_speed(status))
        if await self._applier.apply_status(observed.model_serve, status):
            for transition in transitions(observed.model_serve.get("status") or {}, status, warnings=decision.warnings):
                await self._applier.announce(observed.model_serve, transition)

    async def _learn(self, observed: Observed, decision: Decision, speed: list[dict[str, Any]]) -> None:
        """Remember what the workers of the wanted revision measured, and `speed` as the status shows it. A failure to
        store it stops nothing else.
        """
        target, facts = decision.target, decision.facts
        if target is None or facts is None or decision.source is None:
            return
        factors = speed_factors(speed, target.plan) if speed else {}
        teaches_all = {observed.namespace, "*"} & set(self._settings.learn_for_all)
        entries = [
            measurement(
                measured,
                target.plan,
                facts,
                namespace="" if teaches_all else observed.namespace,
                engine_version=engine_version,
                model_uri=decision.source.uri,
                measured_at=pod.created,
                speed=factors,
                acceptance=acceptance_of(observed.reports.get(pod.uid), target.plan, decision.source.uri),
            )
            for pod in observed.pods_of(target.hash)
            for measured, engine_version in _measured(pod, observed.reports.get(pod.uid))
        ]
        async with self._learning:
            learned = self._shared.learned.including(filter(None, entries))
            if learned is self._shared.learned:
                return
            self._shared.learned = learned
            try:
                body = self._shared.calibration_config_map(learned)
                self._shared.wrote(await self._applier.apply_shared(CONFIG_MAP, body))
            except (KubeError, NameTakenError) as error:
                logger.warning("what was measured is kept in memory only, until the next start: %s", error)


def _measured(pod: Pod, report: WorkerReport | None) -> Iterator[tuple[Mapping[str, int], str]]:
    """(bytes by term, release that measured) as a ready worker reports it, or one that found too little memory."""
    if report is not None:
        yield {term.name: term.measured_bytes for term in report.terms}, report.engine_version
    elif pod.failure is not None:
        yield pod.failure.measured, pod.failure.engine_version


def _explained(failed: WriteError | None, *, now: datetime) -> WriteFailure | None:
    match failed:
        case NameTakenError():
            return name_taken(str(failed))
        case DriftContestedError():
            return contested(str(failed), again=failed.again, now=now)
        case UnfitError():
            return unfit(str(failed))
        case KubeError():
            return refused(failed.status, str(failed))
    return None


def _stalled_by(decision: Decision, failure: WriteFailure) -> Decision:
    """The decision, as far as a write that failed for good leaves it."""
    accepted = failure.finding if failure.of_spec else decision.accepted
    return replace(decision, accepted=accepted, stalled=decision.stalled or failure.finding)


def _next_attempt(observed: Observed, running: Mapping[str, RunningRevision]) -> float | None:
    """Seconds until the first revision that failed is tried again."""
    due = [revision.record.retry_at for revision in running.values() if revision.record and revision.failing]
    return max(0.0, (min(due) - observed.now).total_seconds()) + 0.1 if due else None


def _replicas(observed: Observed, decision: Decision) -> int | None:
    """As the spec says, or under one that is refused as the last accepted one said; None where that is not known."""
    if decision.spec is not None:
        return decision.spec.replicas
    noted = (observed.model_serve.get("status") or {}).get("desiredReplicas")
    return noted if isinstance(noted, int) else None


def _step(observed: Observed, decision: Decision, running: dict[str, RunningRevision], *, replicas: int | None) -> Step:
    serving, target = observed.selected, decision.target
    if decision.spec is None:
        selects_all = observed.service is not None and serving is None
        return kept(running, serving=serving, selects_all=selects_all, replicas=replicas)
    others = [each for plan_hash, each in known_revisions(observed).items() if plan_hash in running]
    step = next_step(
        target=target.hash if target else None,
        running=running,
        serving=serving,
        replicas=decision.spec.replicas,
        rollout=decision.spec.rollout,
        replacement=replacements(others, target, selected=observed.selected) if target else {},
        contested=bool(observed.rivals),
    )
    if target is None or step.replicas.get(target.hash, 0) <= 1 or not waits_for_commits(target, observed):
        return step
    # One pod asks the Hub which commit it is to serve; the others follow once it has told, so that all serve the same.
    there = running[target.hash].replicas if target.hash in running else 0
    alone = min(step.replicas[target.hash], max(1, there))
    return replace(step, replicas={**step.replicas, target.hash: alone}, complete=False)
