"""The heartbeat of the operator: gather, decide, build, apply, report. One function, safe to run at any moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from modelserve.quality.cache_quality import CacheQuality
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CONFIG_MAP
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.cluster.store import shown_speed
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.inventory.measurements import quality_of, weights_digest
from modelserve_operator.learning.calibration import measurement
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.learning.speed_calibration import speed_factors
from modelserve_operator.observed.snapshot import Observed, Pod, WorkerReport
from modelserve_operator.planning.decision import Decision
from modelserve_operator.planning.drafters import acceptance_of
from modelserve_operator.planning.plan import decide
from modelserve_operator.planning.wanted import moving, waiting_to_move
from modelserve_operator.process.work_queue import Key
from modelserve_operator.reporting import resource_metrics
from modelserve_operator.reporting.reconciliation import LOOKS, Reconciliation
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
from modelserve_operator.settings import Settings
from modelserve_operator.sources import surges_first
from modelserve_operator.writing.apply import (
    Applier,
    NameTakenError,
    PredecessorError,
    StatusOvertakenError,
    UnfitError,
)
from modelserve_operator.writing.buffer_writer import CapacityBuffers
from modelserve_operator.writing.children import Children
from modelserve_operator.writing.drift import DriftContestedError
from modelserve_operator.writing.gateway_routes import GatewayRoutes
from modelserve_operator.writing.halted_moves import HaltedMoves
from modelserve_operator.writing.status_contest import StatusContestedError

logger = logging.getLogger(__name__)

PREDECESSOR_SECONDS = 2.0
ReconcileStep = Callable[[Reconciliation], Awaitable[float | None]]


class Ended(Exception):  # noqa: N818 - no error: the steps that are left have nothing to go on
    """A step has found that the rest waits for another reconcile, in `again` seconds."""

    def __init__(self, again: float) -> None:
        super().__init__(again)
        self.again = again


class Reconciler:
    """Reconciles an object at a time, each time from what is observed, not from what an earlier call knew."""

    def __init__(self, gatherer: Gatherer, applier: Applier, shared: SharedConfig, settings: Settings) -> None:
        self._gatherer = gatherer
        self._applier = applier
        self._children = Children(applier, settings)
        self._buffers = CapacityBuffers(applier, settings)
        self._routes = GatewayRoutes(applier)
        self._shared = shared
        self._learning = asyncio.Lock()  # what is learned is one object for all ModelServes
        self._settings = settings
        self._halted = HaltedMoves(gatherer, applier, settings)
        self._admitted: dict[Key, str] = {}  # moves that the store may not show yet, and to which image
        self._steps: tuple[ReconcileStep, ...] = (
            self._choose_pods_to_delete,
            self._write_routes,
            self._write_children,
            self._spare_workers,
            self._write_buffer,
            self._explain_what_failed,
            self._report,
            self._raise_what_is_not_explained,
        )

    async def reconcile(self, key: Key) -> float | None:
        """Bring one ModelServe a step nearer to its spec: observe it, decide, and write, by `_steps` in their order.

        Returns seconds until it is to be reconciled again though nothing is heard of it, the least that a look
        (`LOOKS`) or a step asks for; None: not at all. Every write that fails is said in the status. Those that failed
        for good are tried again after a while; of another the error is raised, for the queue to back off.
        """
        observed = await self._gatherer.observe(key)
        if observed is None or observed.model_serve["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None  # the garbage collector deletes the children
        self._applier.note_retry(key, labels.annotation_of(observed.model_serve, labels.RETRY))
        this = await self._decided(key, observed)
        wanted = {look.__name__: look(this) for look in LOOKS}
        try:
            for step in self._steps:
                wanted[step.__name__] = await step(this)
        except Ended as end:
            return end.again
        again, why = min(((after, why) for why, after in wanted.items() if after is not None), default=(None, ""))
        logger.debug("%s/%s is reconciled again in %s s: %s", *key, again, why)
        return again

    def _forget(self, key: Key) -> None:
        resource_metrics.forget(*key)
        self._applier.forget(key)
        self._admitted.pop(key, None)
        self._halted.note(key, None)

    async def _decided(self, key: Key, observed: Observed) -> Reconciliation:
        """What is wanted, and the next step there. Pods of others are asked for only where a step may lose to them."""
        decision = self._in_turn(key, decide(observed, self._settings), observed.now)
        await self._halted.tell()
        fleet = len(self._gatherer.fleet()) if decision.move is not None else 0
        this = Reconciliation(key, observed, decision, fleet)
        if (exposed := this.exposed) is not None:
            rivals = await self._gatherer.pending_pods.rivals(observed, exposed)
            this.beside(replace(observed, rivals=rivals))
        return this

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

    async def _choose_pods_to_delete(self, this: Reconciliation) -> float | None:
        """Where a Deployment is about to shrink, have those of its pods go that have to leave their node anyway."""
        if surges_first(this.observed.model_serve):
            for pod in this.observed.workers:
                if pod.uid in this.observed.to_move and pod.plan_hash in this.shrinking:
                    await self._applier.prefer_to_delete(this.observed.namespace, pod.name)
        return None

    async def _write_routes(self, this: Reconciliation) -> float | None:
        """Before the children: what a pool no longer selects may go."""
        this.refused_route = await self._routes.apply(this.observed, this.decision, this.step)
        return REFUSED_SECONDS if this.refused_route is not None else None

    async def _write_children(self, this: Reconciliation) -> float | None:
        """The Service before an old revision goes; what failed is explained once all else was tried."""
        stays = this.refused_route is not None and this.refused_route.selects_others
        this.failed = await self._children.apply(this.observed, this.decision, this.step, this.running, all_stay=stays)
        return None

    async def _spare_workers(self, this: Reconciliation) -> float | None:
        """Have autoscalers spare the workers that they should; what cannot be written stops nothing."""
        for pod, changed in disruption.changes(this.observed, replicas=this.replicas):
            try:
                await self._applier.reannotate(Key(this.observed.namespace, pod.name), changed)
            except KubeError as error:
                logger.info("%s/%s is not told to autoscalers: %s", this.observed.namespace, pod.name, error)
                return REFUSED_SECONDS
        return None

    async def _write_buffer(self, this: Reconciliation) -> float | None:
        """Capacity that waits for more workers."""
        this.refused_buffer = await self._buffers.apply(this.observed, this.decision, this.running)
        return REFUSED_SECONDS if this.refused_buffer is not None else None

    async def _explain_what_failed(self, this: Reconciliation) -> float | None:
        """A child that could not be written, in words for the status; one of a predecessor has to go first."""
        if isinstance(this.failed, PredecessorError):
            logger.info("%s/%s waits for the garbage collector: %s", *this.key, this.failed)
            raise Ended(PREDECESSOR_SECONDS)
        this.failure = failure = _explained(this.failed, now=this.observed.now)
        if failure is None or failure.delay is None:
            return None
        accepted = failure.finding if failure.of_spec else this.decision.accepted
        stalled = this.decision.stalled or failure.finding
        this.decision = replace(this.decision, accepted=accepted, stalled=stalled)
        return failure.delay

    async def _report(self, this: Reconciliation) -> float | None:
        """Write the status, show and learn what is in it, and announce what is new."""
        decision, observed, status = this.decision, this.observed, summarise(this)
        desired = 0 if decision.rests and not this.running else this.desired
        resource_metrics.show(*this.key, status, desired=desired)
        await self._learn(observed, decision, shown_speed(status))
        try:
            written = await self._applier.apply_status(observed.model_serve, status)
        except StatusOvertakenError as error:
            logger.debug("%s/%s is reconciled again: %s", *this.key, error)
            raise Ended(0.0) from error
        except StatusContestedError as error:
            return error.delay
        shown = observed.model_serve.get("status") or {}
        for transition in transitions(shown, status, warnings=decision.warnings) if written else ():
            await self._applier.announce(observed.model_serve, transition)
        return None

    async def _learn(self, observed: Observed, decision: Decision, speed: list[dict[str, Any]]) -> None:
        """Remember what the workers of the wanted revision measured, and `speed` as the status shows it. A failure to
        store it stops nothing else.
        """
        target, facts = decision.target, decision.facts
        if target is None or facts is None or decision.source is None:
            return
        factors = speed_factors(speed, target.plan) if speed else {}
        weights = weights_digest(decision.source.hash, facts)
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
                cache_quality=_quality(observed.reports.get(pod.uid), weights),
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

    async def _raise_what_is_not_explained(self, this: Reconciliation) -> float | None:
        """A write that failed for the moment only is the queue's to try again."""
        if this.failed is not None and (this.failure is None or this.failure.delay is None):
            raise this.failed
        return None


def _explained(failed: Exception | None, *, now: datetime) -> WriteFailure | None:
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


def _quality(report: WorkerReport | None, weights: str) -> dict[str, CacheQuality]:
    found = report.cache_quality if report is not None else None
    return {} if found is None else {quality_of(weights, found): found}


def _measured(pod: Pod, report: WorkerReport | None) -> Iterator[tuple[Mapping[str, int], str]]:
    """(bytes by term, release that measured) as a ready worker reports it, or one that found too little memory."""
    if report is not None:
        yield {term.name: term.measured_bytes for term in report.terms}, report.engine_version
    elif pod.failure is not None:
        yield pod.failure.measured, pod.failure.engine_version
