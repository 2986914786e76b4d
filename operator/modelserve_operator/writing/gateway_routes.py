"""Writes what spec.gateway asks for. Neither its absence nor a refusal keeps anything else from being done."""

from __future__ import annotations

from modelserve.api.gateway import GatewaySpec
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import HTTP_ROUTE, INFERENCE_POOL
from modelserve_operator.manifests.gateway_objects import http_route, inference_pool
from modelserve_operator.observed.snapshot import Body, Observed
from modelserve_operator.planning.decision import Decision
from modelserve_operator.reporting.routed import RefusedRoute
from modelserve_operator.rollout.next_step import Step
from modelserve_operator.writing.apply import WRITE_ERRORS, Applier


class GatewayRoutes:
    """The HTTPRoute and the InferencePool of each ModelServe."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def apply(self, observed: Observed, decision: Decision, step: Step) -> RefusedRoute | None:
        """Have them, once there is a Service, or have none. Raises nothing.

        The pool comes before the children: what it no longer selects may go.
        """
        if decision.spec is None:
            return None
        asked = decision.spec.gateway
        picker = asked.endpoint_picker if asked is not None else None
        try:
            if asked is not None and step.serve is not None and observed.service is not None:
                await self._write(observed, asked, plan_hash=None if step.shared else step.serve)
            # A pool goes after the route that led there leads elsewhere.
            if asked is None and observed.http_route is not None:
                await self._applier.delete(HTTP_ROUTE, observed.http_route)
            if picker is None and observed.inference_pool is not None:
                await self._applier.delete(INFERENCE_POOL, observed.inference_pool)
        except WRITE_ERRORS as error:
            return RefusedRoute(str(error), selects_others=picker is not None and _selects_others(observed, step))
        return None

    async def _write(self, observed: Observed, asked: GatewaySpec, *, plan_hash: str | None) -> None:
        """A route that leads somewhere: where its pool cannot be, it stays as it is."""
        if asked.endpoint_picker is not None:
            if INFERENCE_POOL in observed.not_served:
                return
            pool = inference_pool(observed.model_serve, asked.endpoint_picker, plan_hash=plan_hash)
            await self._applier.apply(INFERENCE_POOL, pool)
        if HTTP_ROUTE not in observed.not_served:
            await self._applier.apply(HTTP_ROUTE, http_route(observed.model_serve, asked))


def _selects_others(observed: Observed, step: Step) -> bool:
    """Whether the pool, as it is, selects workers of another revision than the one that serves."""
    spec: Body = (observed.inference_pool or {}).get("spec") or {}
    selected = ((spec.get("selector") or {}).get("matchLabels") or {}).get(labels.PLAN_HASH)
    return selected not in (None, step.serve)
