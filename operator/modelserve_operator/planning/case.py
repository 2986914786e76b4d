"""One ModelServe that is decided on: what is asked, what is committed and what is proposed. Pure.

Two words for revisions. *Committed*: one that is kept, with a ControllerRevision of its own. *Proposed*: one that would
be committed now, were it asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from modelserve.api import ModelServe, ModelServeSpec, PlanStatus
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.store import approver
from modelserve_operator.manifests.worker_template import drafts
from modelserve_operator.observed.inspection import known_assistant, known_facts
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.acceptance import acceptable
from modelserve_operator.planning.amiss import catalogue_faults, drafter_left_out, spec_faults
from modelserve_operator.planning.approval import Choice, choose, latest
from modelserve_operator.planning.caching import cache_missing, with_commit
from modelserve_operator.planning.decision import NOT_PLANNED, Decision, Finding, Warn
from modelserve_operator.planning.drafters import drafters_to_read
from modelserve_operator.planning.reading import Reading, reading_of
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for, worker_of_today
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision, Worker
from modelserve_operator.settings import Settings
from modelserve_operator.sources import ModelSource, cached_model, model_source


@dataclass(frozen=True)
class Case:
    """Answers about one ModelServe, each worked out when a check first asks for it.

    A check may ask for what the checks above it have found to be there: `source` of a valid spec, `today` of a model
    whose facts are known.
    """

    observed: Observed
    settings: Settings

    @cached_property
    def parsed(self) -> tuple[ModelServe, tuple[str, ...]]:
        """The object, and fields of later releases that it has. Raises InvalidInput."""
        return ModelServe.parse_of_any_release(self.observed.model_serve)

    @cached_property
    def spec(self) -> ModelServeSpec:
        """What is asked for; of a model in a cache, with the commit that the cache holds."""
        return with_commit(self.parsed[0].spec, self.observed)

    @cached_property
    def cache_missing(self) -> Finding | None:
        """Why pods cannot read the cache that the spec names."""
        return cache_missing(self.parsed[0].spec, self.observed)

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        cache = self.observed.model_cache
        return model_source(self.spec, cached_model(cache) if cache is not None else None)

    @cached_property
    def accepted(self) -> Finding:
        """Whether the installation allows the spec, and its namespace can serve it."""
        return acceptable(self.spec, self.observed, self.settings)

    @property
    def spec_faults(self) -> tuple[Warn, ...]:
        """What is amiss in the spec's own words, and stops nothing."""
        return tuple(spec_faults(self.parsed[1], self.source))

    @cached_property
    def facts(self) -> ModelFacts | None:
        """What the model is; None until it was read."""
        return known_facts(self.observed, self.source)

    @cached_property
    def worker(self) -> Worker:
        """The worker that a proposed revision has."""
        return worker_of_today(self.spec, self.settings)

    @cached_property
    def drafters(self) -> tuple[tuple[ModelSource, AssistantFacts | None], ...]:
        """The drafters that have to be read before anything is planned, and what they are; None until they were."""
        named = drafters_to_read(self.spec) if drafts(self.worker) else ()
        return tuple((each, known_assistant(self.observed, each)) for each in named)

    @property
    def assistants(self) -> dict[str, AssistantFacts]:
        """What of these is known, by address."""
        return {source.uri: facts for source, facts in self.drafters if facts is not None}

    @cached_property
    def drafter_readings(self) -> tuple[Reading, ...]:
        """How the reading of drafters stands that nothing is known of yet."""
        return tuple(reading_of(self.observed, source) for source, facts in self.drafters if facts is None)

    @cached_property
    def unplanned(self) -> Decision:
        """The decision as far as it goes without a plan, with what is amiss up to there."""
        decision = Decision(self.accepted, NOT_PLANNED, spec=self.spec, source=self.source, warnings=self.spec_faults)
        if self.facts is None:
            return decision
        warnings = (*self.spec_faults, *catalogue_faults(self.spec, self.observed.supply.catalogue))
        decision = replace(decision, facts=self.facts, drafters=self.drafters, warnings=warnings)
        failed = [reading for reading in self.drafter_readings if reading.planned.ok is not None]
        told = (f"Planned without the drafter: {reading.planned.message}" for reading in failed)
        warned = decision.warned(*(Warn(Reason.DRAFTER_UNAVAILABLE, each) for each in told))
        return replace(warned, inspect=tuple(reading.source for reading in failed))

    @cached_property
    def undecided(self) -> Decision:
        """The decision as far as it goes with a plan, before it is known which revision is wanted."""
        return self.unplanned.warned(*drafter_left_out(self.spec, self.worker))

    @cached_property
    def named(self) -> Revision | None:
        """The committed revision that `spec.plan.revision` names; None where there is none of the name."""
        name = self.spec.plan.revision
        return self.observed.history.named(name) if name is not None else None

    @cached_property
    def committed(self) -> tuple[Revision, ...]:
        """Revisions that were committed for this very spec."""
        return self.observed.history.committed_for(self.spec)

    @cached_property
    def committed_plan(self) -> Revision | None:
        """The last committed revision whose plan is of the same inputs, whatever its pods are like."""
        return self.observed.history.committed_for_plan_of(self.spec)

    @property
    def approvals(self) -> tuple[str, ...]:
        """Hashes that people approved, the spec's before the annotation's."""
        asked = (self.spec.plan.approved_hash, labels.annotation_of(self.observed.model_serve, labels.APPROVE_PLAN))
        return tuple(filter(None, asked))

    @cached_property
    def today(self) -> PlanStatus:
        """The plan as it would be made now. Raises InvalidInput for settings that contradict the model."""
        assert self.facts is not None
        left_out = any(drafter_left_out(self.spec, self.worker))
        return plan_for(
            self.spec.model_copy(update={"drafter": None}) if left_out else self.spec,
            self.facts,
            self.observed.supply,
            committed=latest(self.committed) or self.committed_plan,
            assistants=self.assistants,
            image_architectures=self.settings.worker_architectures,
        )

    @cached_property
    def builder(self) -> RevisionBuilder:
        """Makes what is proposed."""
        assert self.facts is not None
        return RevisionBuilder(
            self.spec,
            self.observed.name,
            self.source,
            self.facts,
            self.settings,
            generation=self.observed.generation,
            approved_by=approver(self.observed.model_serve),
            assistants=self.assistants,
        )

    @cached_property
    def proposed_today(self) -> Revision | None:
        """The revision of today's plan; None where nothing fits, and beside nothing that runs a preview needs none."""
        shown_alone = self.spec.plan.mode == "PreviewOnly" and not self.observed.deployments
        return self.builder.proposed(self.today) if self.today.fits and not shown_alone else None

    @cached_property
    def proposed(self) -> tuple[Revision, ...]:
        """What could be committed now, the first of which an automatic mode takes: a committed plan of the same inputs
        goes before today's, so that an edit of pods changes no plan."""
        same = self.committed_plan if not self.committed else None
        kept = self.builder.with_plan_of(same) if same is not None else None
        return tuple(each for each in (kept, self.proposed_today) if each is not None)

    @cached_property
    def choice(self) -> Choice:
        """Which revision runs, of those that are committed and proposed."""
        automatic = self.spec.plan.mode == "Automatic"
        return choose(self.committed, self.proposed, approvals=self.approvals, automatic=automatic)
