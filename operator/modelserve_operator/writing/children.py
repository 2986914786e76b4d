"""Writes the children of a ModelServe as they were decided on, part by part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    SERVICE,
    ResourceKind,
)
from modelserve_operator.manifests.claim_template import claim_template
from modelserve_operator.manifests.inspect_job import inspect_job
from modelserve_operator.manifests.metadata import owner_reference
from modelserve_operator.manifests.revision_objects import (
    commit_annotations,
    commit_config_map,
    controller_revision,
    deployment,
    engine_config_map,
)
from modelserve_operator.manifests.serving_objects import disruption_budget, model_facts_config_map, service
from modelserve_operator.observed.inspection import answer_lost, attempts, job_named, left_behind, retry_at
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Decision
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout.next_step import RunningRevision, Step
from modelserve_operator.rollout.running import committed_revisions
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource
from modelserve_operator.writing.apply import WRITE_ERRORS, Applier, NameTakenError, WriteError

REVISION_HISTORY_LIMIT = 5  # of a spec that says nothing: no default of the schema, which 0.1.0 would not know
Part = Callable[[], Awaitable[None]]


class Children:
    """Everything that a ModelServe owns, the status apart."""

    def __init__(self, applier: Applier, settings: Settings) -> None:
        self._applier = applier
        self._settings = settings

    async def apply(
        self,
        observed: Observed,
        decision: Decision,
        step: Step,
        running: dict[str, RunningRevision],
        *,
        all_stay: bool = False,
    ) -> WriteError | None:
        """Try every part, whatever becomes of the others, and return what failed first.
        With `all_stay` no revision gets smaller.

        What all revisions share comes before them: while the Service cannot be switched, what it selects does not get
        smaller and nothing is deleted, and while a name is taken, no revision is started. Deletions wait for nothing
        else: what is over is told by what was observed, and one child that cannot be written would keep it for ever.
        """
        owner = owner_reference(observed.model_serve)
        orphans = [partial(self._applier.adopt, kind, body, owner) for kind, body in observed.orphans]
        failures = [await _tried(part) for part in orphans]
        failures.append(await _tried(partial(self._apply_inspection, observed, decision)))
        serves = step.serve is not None
        switched = taken = False
        if serves:
            selected = None if step.shared else step.serve
            body = service(observed.model_serve, plan_hash=selected, type_=self._settings.service_type)
            shared = [await _tried(partial(self._apply, SERVICE, body))]
            switched = shared[0] is None
            shared.append(
                await _tried(partial(self._apply, DISRUPTION_BUDGET, disruption_budget(observed.model_serve)))
            )
            taken = any(isinstance(failure, NameTakenError) for failure in shared)
            failures += shared
        selects = observed.service is not None and observed.selected in (None, step.serve)
        leads = switched or not serves or selects
        may_shrink = leads and not all_stay
        for plan_hash, growth, part in self._revisions(observed, decision, step, running):
            if (may_shrink or growth >= 0) and (plan_hash in running or not taken):
                failures.append(await _tried(part))
        if leads:
            failures.append(await _tried(partial(self._prune, observed, decision, step)))
        return next((failure for failure in failures if failure is not None), None)

    async def _apply(self, kind: ResourceKind, body: Mapping[str, Any]) -> None:
        """Apply a child, with the labels and annotations of the settings."""
        await self._applier.apply(kind, self._labelled(body))

    def _labelled(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A child with the labels and annotations of the settings; those of the operator itself win."""
        metadata = dict(body["metadata"])
        for field, common in (
            ("labels", self._settings.child_labels),
            ("annotations", self._settings.child_annotations),
        ):
            if common:
                metadata[field] = {**common, **metadata.get(field, {})}
        return {**body, "metadata": metadata}

    async def _apply_inspection(self, observed: Observed, decision: Decision) -> None:
        """Run the inspect Job, or store what it found and remove it."""
        for source, facts in ((decision.source, decision.facts), *decision.drafters):
            if decision.spec is not None and source is not None:
                await self._inspect(observed, decision.spec, source, facts, wanted=source in decision.inspect)

    async def _inspect(
        self,
        observed: Observed,
        spec: ModelServeSpec,
        source: ModelSource,
        facts: ModelFacts | AssistantFacts | None,
        *,
        wanted: bool,
    ) -> None:
        name = labels.inspection_name(observed.name, source.hash)
        running = job_named(observed, name)
        due = retry_at(observed, name)
        again = wanted and due is not None and due <= observed.now and left_behind(observed, name) is None
        if wanted:
            job = inspect_job(
                observed.model_serve,
                spec,
                source=source,
                image=spec.image or self._settings.worker_image,
                pull_policy=self._settings.image_pull_policy,
                pull_secrets=self._settings.image_pull_secrets,
                architectures=self._settings.worker_architectures,
                user_id=self._settings.pod_user_id,
                attempts=attempts(running) + 1 if running is not None and again else 1,
            )
            # The template of a Job cannot be changed: one that is to be another is made anew.
            edited = running is not None and _made_from(running) not in (None, _made_from(job))
            if running is not None and (again or edited):
                await self._applier.delete(JOB, running)
            if running is None or again or edited:
                await self._apply(JOB, job)
                return
        if wanted and running is not None and answer_lost(observed, name):
            await self._applier.delete(JOB, running)  # its event brings a new one
        elif facts is not None and running is not None:
            config_map = model_facts_config_map(observed.model_serve, source=source, facts=facts)
            await self._apply(CONFIG_MAP, config_map)
            await self._applier.delete(JOB, running)

    def _revisions(
        self, observed: Observed, decision: Decision, step: Step, running: dict[str, RunningRevision]
    ) -> list[tuple[str, int, Part]]:
        """Each revision that runs or should, by how many replicas it grows, and the part that writes it."""
        committed = committed_revisions(observed)
        revisions = committed | ({decision.target.hash: decision.target} if decision.target is not None else {})

        # What shrinks goes first: it makes the room for what grows.
        def growth(plan_hash: str) -> int:
            return step.replicas[plan_hash] - (running[plan_hash].replicas if plan_hash in running else 0)

        parts: list[tuple[str, int, Part]] = []
        for plan_hash in sorted(step.replicas, key=growth):
            if plan_hash in revisions:
                record = running[plan_hash].record if plan_hash in running else None
                revision = revisions[plan_hash]
                body = deployment(observed.model_serve, revision, replicas=step.replicas[plan_hash], record=record)
                # One that is imported is kept once it can be told whether it is of the spec: the spec can be read.
                part = partial(self._apply_revision, observed, revision, body, store=decision.spec is not None)
                if decision.turn.undone == plan_hash:
                    part = partial(self._give_up, observed, revision, part)
                parts.append((plan_hash, growth(plan_hash), part))
        return parts

    async def _apply_revision(
        self, observed: Observed, revision: Revision, body: Mapping[str, Any], *, store: bool
    ) -> None:
        """The Deployment; before it the worker's settings, and before these the revision that both are made from."""
        stored = {each["metadata"]["name"]: each for each in observed.controller_revisions}
        live = stored.get(body["metadata"]["name"])
        if live is None and store:
            await self._apply(CONTROLLER_REVISION, controller_revision(observed.model_serve, revision))
        elif live is not None and live.get("revision") != revision.number:
            await self._applier.renumber(live, revision.number)
        elif live is not None:
            for key, commit in commit_annotations(revision).items():
                if labels.annotation_of(live, key) != commit:
                    await self._applier.annotate(CONTROLLER_REVISION, live, key, commit)
                    break  # another event comes of it
        for source, commit in ((revision.source, revision.commit), *revision.pinned_drafters):
            if source and commit:
                recorded = commit_config_map(observed.model_serve, source=source, commit=commit)
                await self._applier.render(CONFIG_MAP, self._labelled(recorded))
        await self._applier.render(CONFIG_MAP, self._labelled(engine_config_map(observed.model_serve, revision)))
        claims = claim_template(observed.model_serve, revision)
        if claims is not None:
            await self._apply(CLAIM_TEMPLATE, claims)
        await self._apply(DEPLOYMENT, body)

    async def _give_up(self, observed: Observed, revision: Revision, part: Part) -> None:
        """Note that a revision which came by itself is given up, so that it does not come again; then `part`."""
        name = labels.revision_name(observed.name, revision.hash)
        for live in observed.controller_revisions:
            if live["metadata"]["name"] == name:
                await self._applier.annotate(CONTROLLER_REVISION, live, labels.UNDONE, "true")
        await part()

    async def _prune(self, observed: Observed, decision: Decision, step: Step) -> None:
        """Delete revisions that are over, and inspections of models that the spec no longer names."""
        committed = committed_revisions(observed)
        for body in observed.deployments:
            ended = labels.label_of(body, labels.PLAN_HASH) or ""
            lost = ended not in committed and step.replicas.get(ended) == 0  # nothing to apply it from any more
            if ended in step.delete or lost:
                await self._applier.delete(DEPLOYMENT, body)
        kept = {*step.replicas, step.serve, decision.target.hash if decision.target else None}
        if decision.spec is None or decision.source is None:
            return
        current = [each.hash for each in (decision.source, *(source for source, _ in decision.drafters))]
        looked_for = {labels.model_facts_name(observed.name, each.hash) for each in decision.inspect}
        stored = {labels.model_facts_name(observed.name, each) for each in current}
        wanted = {labels.inspection_name(observed.name, each) for each in current}
        kept_revisions = [each for each in (*observed.revisions, decision.target) if each is not None]
        sources = {source for each in kept_revisions for source in (each.source, *each.drafter_sources)}
        commits = {labels.commit_name(observed.name, each) for each in sources}
        for body in observed.config_maps:
            plan_hash, component = (labels.label_of(body, each) for each in (labels.PLAN_HASH, labels.COMPONENT))
            stale_revision = plan_hash is not None and plan_hash not in kept and step.complete
            # Facts that are stored and yet looked for were written by a release that this one does not understand.
            stale_facts = component == labels.MODEL_FACTS and body["metadata"]["name"] not in stored - looked_for
            stale_commit = component == labels.COMMIT and body["metadata"]["name"] not in commits
            if stale_revision or stale_facts or stale_commit:
                await self._applier.delete(CONFIG_MAP, body)
        for body in observed.claim_templates:
            if labels.label_of(body, labels.PLAN_HASH) not in kept and step.complete:
                await self._applier.delete(CLAIM_TEMPLATE, body)
        for body in observed.jobs:
            if body["metadata"]["name"] not in wanted:
                await self._applier.delete(JOB, body)
        if step.complete:
            asked = decision.spec.revision_history_limit
            limit = REVISION_HISTORY_LIMIT if asked is None else asked
            surplus = observed.history.surplus(kept=filter(None, kept), limit=limit)
            names = {labels.revision_name(observed.name, each) for each in surplus}
            for body in observed.controller_revisions:
                if body["metadata"]["name"] in names:
                    await self._applier.delete(CONTROLLER_REVISION, body)


def _made_from(job: Mapping[str, Any]) -> str | None:
    """Digest of what the spec made of an inspect Job; earlier releases noted none."""
    return labels.annotation_of(job, labels.MADE_FROM)


async def _tried(part: Part) -> WriteError | None:
    try:
        await part()
    except WRITE_ERRORS as error:
        return error
    return None
