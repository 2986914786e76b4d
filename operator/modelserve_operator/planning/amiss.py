"""What is amiss beside a spec and stops nothing, as warnings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from modelserve.api import ModelServeSpec
from modelserve.catalogue import CATALOGUE_NAME
from modelserve.model.model_facts import ModelFacts
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.manifests.worker_template import drafts
from modelserve_operator.observed.forgeries import refused_annotations
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Decision, Warn
from modelserve_operator.planning.spot import short_notice
from modelserve_operator.reasons import Reason
from modelserve_operator.revisions.revision import Revision, Worker
from modelserve_operator.sources import ModelSource, unpinned

MOST_FAULTS, FAULT_LIMIT = 3, 300  # of catalogue entries: how many are told, and characters of each


def refused_objects(observed: Observed) -> Iterator[Warn]:
    """What passes for a revision or for ours, and past revisions that cannot be read: none of it stops anything."""
    history = observed.history
    forged = refused_annotations(observed.deployments, observed.now)
    yield from (Warn(Reason.ANNOTATION_REFUSED, each) for each in islice(forged, MOST_FAULTS))
    yield from (Warn(Reason.REVISION_REFUSED, each) for each in islice(history.refused, MOST_FAULTS))
    past = (each for each in history.unreadable if not each.blocks)
    for each in islice(past, MOST_FAULTS):
        yield Warn(Reason.REVISION_UNREADABLE, f"{each.kind} {each.name} cannot be read: {each.why}.")


def spec_faults(unknown: tuple[str, ...], source: ModelSource) -> Iterator[Warn]:
    """Fields of a later release, and a model whose revision may move."""
    if unknown:
        told = ", ".join(unknown[:MOST_FAULTS]) + (", ..." if len(unknown) > MOST_FAULTS else "")
        message = f"{told} of a later release: this one does not know it and ignores it."
        yield Warn(Reason.UNKNOWN_FIELDS, message)
    yield from (Warn(Reason.MODEL_UNPINNED, each) for each in unpinned(source))


def catalogue_faults(spec: ModelServeSpec, catalogue: Catalogue) -> Iterator[Warn]:
    """Entries that this spec would use, were they right; the first few say enough."""
    named = spec.accelerators.products if spec.accelerators else None
    faults = (fault for product, fault in catalogue.faults.items() if named is None or product in named)
    for fault in islice(faults, MOST_FAULTS):
        message = f"ConfigMap {CATALOGUE_NAME}: {fault[:FAULT_LIMIT]}; the entry is ignored."
        yield Warn(Reason.CATALOGUE_ENTRY_IGNORED, message)


def drafter_left_out(spec: ModelServeSpec, worker: Worker) -> Iterator[Warn]:
    """A worker of a release without drafts is planned without the drafter."""
    if spec.drafter is not None and spec.drafter.asks and not drafts(worker):
        message = (
            f"spec.drafter is left out: worker {worker.image} is of release {worker.release}, which has no drafts."
        )
        yield Warn(Reason.DRAFTER_UNAVAILABLE, message)


def exchanged_files(facts: ModelFacts | None, committed: Revision) -> Iterator[Warn]:
    """Where the files were read again since: a worker that starts now serves others than those that run."""
    if facts is not None and facts.identity and committed.identity and facts.identity != committed.identity:
        message = f"The checkpoint's files are not those that plan {committed.plan.hash} was made for."
        yield Warn(Reason.MODEL_CHANGED, message)


def reclaims(decision: Decision, observed: Observed) -> Iterator[Warn]:
    """Nodes that a cloud takes back sooner than a worker stops, of the plan that runs or would."""
    shown = next((each.plan for each in (decision.target, decision.proposed) if each is not None), decision.plan)
    if decision.spec is not None and shown is not None and shown.fits:
        told = short_notice(decision.spec, shown, observed.supply.pools)
        if told is not None:
            yield Warn(Reason.SPOT_NOTICE, f"{told}.")
