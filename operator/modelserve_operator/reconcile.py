"""The heartbeat of the operator: gather, decide, build, apply, report. One function, safe to run at any moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelserve_operator import labels, metrics
from modelserve_operator.apply import Applier, NameTakenError, PredecessorError
from modelserve_operator.calibration import measurement
from modelserve_operator.conditions import View
from modelserve_operator.gather import Gatherer
from modelserve_operator.kinds import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, JOB, SERVICE
from modelserve_operator.kube import KubeError
from modelserve_operator.manifests.inspect_job import inspect_job
from modelserve_operator.manifests.revision_objects import deployment, revision_config_map
from modelserve_operator.manifests.serving_objects import disruption_budget, model_facts_config_map, service
from modelserve_operator.observed import Observed
from modelserve_operator.plan import Decision, Finding, decide
from modelserve_operator.reasons import Reason
from modelserve_operator.rollout import RunningRevision, Step, next_step
from modelserve_operator.running import known_revisions, running_revisions
from modelserve_operator.settings import Settings
from modelserve_operator.shared_config import SharedConfig
from modelserve_operator.status import summarise, transitions
from modelserve_operator.work_queue import Key

logger = logging.getLogger(__name__)

ASK_WORKER_AGAIN_SECONDS = 5.0
NAME_TAKEN_SECONDS = 30.0
PREDECESSOR_SECONDS = 2.0
REFUSED_SECONDS = 60.0
INVALID_STATUSES = (400, 422)  # the API server found an object invalid, and would find it so again


class Reconciler:
    """Holds the doors; every call of `reconcile` starts from what is observed, not from what an earlier call knew."""

    def __init__(self, gatherer: Gatherer, applier: Applier, shared: SharedConfig, settings: Settings) -> None:
        self._gatherer = gatherer
        self._applier = applier
        self._shared = shared
        self._settings = settings
        self._learning = asyncio.Lock()  # what is learned is one object for all ModelServes

    async def reconcile(self, key: Key) -> float | None:
        """Bring one ModelServe a step nearer to its spec. Raises KubeError for the queue to retry.

        An object that the API server finds invalid is the spec's fault, and said in the status.

        1. gather: the object, its children, the pools, the workers' reports
        2. decide: is the spec acceptable, what is the model, which revision is wanted
        3. next_step: which revisions run with how many replicas, which one serves
        4. apply: children first, the Service before an old revision goes, the status last
        """
        observed = await self._gatherer.observe(key)
        if observed is None or observed.model_serve["metadata"].get("deletionTimestamp"):
            metrics.SIZING_ERROR.remove_by_labels({"namespace": key.namespace, "name": key.name})
            return None  # the garbage collector deletes the children
        decision = decide(observed, self._settings)
        running = running_revisions(observed, replicas=decision.spec.replicas if decision.spec else None)
        step = _step(observed, decision, running)
        delay = _next_attempt(observed, running)
        try:
            await self._apply(observed, decision, step, running)
        except PredecessorError as error:
            logger.info("%s/%s waits for the garbage collector: %s", *key, error)
            return PREDECESSOR_SECONDS
        except NameTakenError as error:
            taken = Finding(False, Reason.NAME_CONFLICT, str(error))
            decision = replace(decision, accepted=taken, stalled=taken)
            delay = NAME_TAKEN_SECONDS  # the other object carries no label of ours, so no event will tell
        except KubeError as error:
            if error.status not in INVALID_STATUSES:
                raise
            refused = Finding(False, Reason.INVALID_SPEC, f"the API server refuses what the spec leads to: {error}")
            decision = replace(decision, accepted=refused, stalled=refused)
            delay = REFUSED_SECONDS  # unless the spec changes before
        revisions = known_revisions(observed)
        view = View(observed, decision, step, running, replicas=_replicas(decision), revisions=revisions)
        status = summarise(view)
        _measure(observed, status)
        await self._learn(observed, decision)
        if await self._applier.apply_status(observed.model_serve, status):
            for transition in transitions(observed.model_serve.get("status") or {}, status, warnings=decision.warnings):
                await self._applier.announce(observed.model_serve, transition)
        unheard = any(pod.ready and pod.plan_hash and pod.uid not in observed.reports for pod in observed.pods)
        return ASK_WORKER_AGAIN_SECONDS if unheard else delay

    async def _learn(self, observed: Observed, decision: Decision) -> None:
        """Remember what the workers of the wanted revision measured. A failure to store it stops nothing else."""
        target, facts = decision.target, decision.facts
        if target is None or facts is None or decision.source is None:
            return
        reports = [observed.reports[pod.uid] for pod in observed.pods_of(target.hash) if pod.uid in observed.reports]
        uri, now = decision.source.uri, observed.now
        entries = [measurement(report, target.plan, facts, model_uri=uri, now=now) for report in reports]
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

    async def _apply(
        self, observed: Observed, decision: Decision, step: Step, running: dict[str, RunningRevision]
    ) -> None:
        await self._apply_inspection(observed, decision)
        await self._apply_revisions(observed, decision, step, running)
        if step.serve is not None and not decision.stop:
            await self._applier.apply(DISRUPTION_BUDGET, disruption_budget(observed.model_serve))
            await self._applier.apply(SERVICE, service(observed.model_serve, plan_hash=step.serve))
        await self._prune(observed, decision, step)

    async def _apply_inspection(self, observed: Observed, decision: Decision) -> None:
        """Run the inspect Job, or store what it found and remove it."""
        if decision.spec is None or decision.source is None:
            return
        name = labels.inspection_name(observed.name, decision.source.hash)
        running = next((job for job in observed.jobs if job["metadata"]["name"] == name), None)
        if decision.inspect and running is None:  # the template of a Job cannot be changed, so it is not applied again
            job = inspect_job(
                observed.model_serve,
                decision.spec,
                source=decision.source,
                image=decision.spec.image or self._settings.worker_image,
                pull_policy=self._settings.image_pull_policy,
            )
            await self._applier.apply(JOB, job)
        elif decision.inspect and running is not None and _answer_lost(running, observed):
            await self._applier.delete(JOB, running)  # its event brings a new one
        elif decision.facts is not None and running is not None:
            config_map = model_facts_config_map(observed.model_serve, source=decision.source, facts=decision.facts)
            await self._applier.apply(CONFIG_MAP, config_map)
            await self._applier.delete(JOB, running)

    async def _apply_revisions(
        self, observed: Observed, decision: Decision, step: Step, running: dict[str, RunningRevision]
    ) -> None:
        revisions = known_revisions(observed)
        if decision.target is not None and decision.target.hash not in revisions:
            revisions[decision.target.hash] = decision.target
            await self._applier.apply(CONFIG_MAP, revision_config_map(observed.model_serve, decision.target))

        # What shrinks goes first: it makes the room for what grows.
        def growth(plan_hash: str) -> int:
            return step.replicas[plan_hash] - (running[plan_hash].replicas if plan_hash in running else 0)

        for plan_hash in sorted(step.replicas, key=growth):
            if plan_hash in revisions:
                record = running[plan_hash].record if plan_hash in running else None
                body = deployment(
                    observed.model_serve, revisions[plan_hash], replicas=step.replicas[plan_hash], record=record
                )
                await self._applier.apply(DEPLOYMENT, body)

    async def _prune(self, observed: Observed, decision: Decision, step: Step) -> None:
        """Delete revisions that are over, and inspections of models that the spec no longer names."""
        for body in observed.deployments:
            if labels.label_of(body, labels.PLAN_HASH) in step.delete:
                await self._applier.delete(DEPLOYMENT, body)
        kept = {*step.replicas, step.serve, decision.target.hash if decision.target else None}
        current = decision.source.hash if decision.source else None
        if decision.spec is None or current is None:
            return
        wanted = {labels.inspection_name(observed.name, current), labels.model_facts_name(observed.name, current)}
        for body in observed.config_maps:
            plan_hash = labels.label_of(body, labels.PLAN_HASH)
            stale_revision = plan_hash is not None and plan_hash not in kept and step.complete
            # Facts that are stored and yet looked for were written by a release that this one does not understand.
            stale_facts = plan_hash is None and (decision.inspect or body["metadata"]["name"] not in wanted)
            if stale_revision or stale_facts:
                await self._applier.delete(CONFIG_MAP, body)
        for body in observed.jobs:
            if body["metadata"]["name"] not in wanted:
                await self._applier.delete(JOB, body)
        if decision.stop:
            for kind, shared in ((SERVICE, observed.service), (DISRUPTION_BUDGET, observed.disruption_budget)):
                if shared is not None:
                    await self._applier.delete(kind, shared)


def _answer_lost(job: Mapping[str, Any], observed: Observed) -> bool:
    """Whether the Job has ended well, but the pod that held its answer went before it was read."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    complete = any(each["type"] == "Complete" and each.get("status") == "True" for each in conditions)
    return complete and all(pod.job != job["metadata"]["name"] for pod in observed.pods)


def _measure(observed: Observed, status: Mapping[str, Any]) -> None:
    """Set the gauges of the sizing error to what the status says; terms that are gone are removed."""
    who = {"namespace": observed.namespace, "name": observed.name}
    metrics.SIZING_ERROR.remove_by_labels(who)
    accelerator = (status.get("plan") or {}).get("accelerator") or ""
    for term in (status.get("calibration") or {}).get("terms") or ():
        if "errorPercent" in term:
            gauge = metrics.SIZING_ERROR.labels(**who, accelerator=accelerator, term=term["name"])
            gauge.set(float(term["errorPercent"]) / 100)


def _next_attempt(observed: Observed, running: Mapping[str, RunningRevision]) -> float | None:
    """Seconds until the first revision that failed is tried again."""
    due = [revision.record.retry_at for revision in running.values() if revision.record and revision.failing]
    return max(0.0, (min(due) - observed.now).total_seconds()) + 0.1 if due else None


def _replicas(decision: Decision) -> int:
    return decision.spec.replicas if decision.spec else 0


def _step(observed: Observed, decision: Decision, running: dict[str, RunningRevision]) -> Step:
    selector = ((observed.service or {}).get("spec") or {}).get("selector") or {}
    serving = selector.get(labels.PLAN_HASH)
    if decision.spec is None:
        return Step(serve=serving if serving in running else None)  # what runs stays as it is
    if decision.stop:
        return Step(delete=tuple(sorted(running)))
    return next_step(
        target=decision.target.hash if decision.target else None,
        running=running,
        serving=serving,
        replicas=decision.spec.replicas,
        rollout=decision.spec.rollout,
    )
