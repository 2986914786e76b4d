"""Writes the CapacityBuffer of a ModelServe, and its PodTemplate, apart from its other children."""

from __future__ import annotations

from modelserve_operator.allowed import rule_of
from modelserve_operator.cluster.kinds import POD_TEMPLATE, ResourceKind
from modelserve_operator.manifests.buffer_objects import buffer_template, capacity_buffer
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Decision
from modelserve_operator.reporting.capacity_buffers import RefusedBuffer, RunningRevisions, proven, withheld
from modelserve_operator.settings import Settings
from modelserve_operator.writing.apply import WRITE_ERRORS, Applier


class CapacityBuffers:
    """Writes them. Neither their absence nor a refusal keeps anything else from being done."""

    def __init__(self, applier: Applier, settings: Settings) -> None:
        self._applier = applier
        self._settings = settings

    async def apply(self, observed: Observed, decision: Decision, running: RunningRevisions) -> RefusedBuffer | None:
        """Have the buffer, or have none. Raises nothing."""
        kind, spec, target = observed.buffer_kind, decision.spec, decision.target
        if kind is None or spec is None:
            return None
        try:
            there = observed.capacity_buffer is not None
            if spec.capacity_buffer is None or withheld(decision, running, there=there) is not None:
                await self._remove(kind, observed)
            elif target is not None and proven(decision, running):
                await self._applier.apply(POD_TEMPLATE, buffer_template(observed.model_serve, target))
                most = rule_of(observed.namespace, self._settings.allowed).buffer_replicas
                await self._applier.apply(kind, capacity_buffer(observed.model_serve, spec.capacity_buffer, most=most))
        except WRITE_ERRORS as error:
            return RefusedBuffer(str(error))
        return None

    async def _remove(self, kind: ResourceKind, observed: Observed) -> None:
        for each, body in ((kind, observed.capacity_buffer), (POD_TEMPLATE, observed.buffer_template)):
            if body is not None:
                await self._applier.delete(each, body)
