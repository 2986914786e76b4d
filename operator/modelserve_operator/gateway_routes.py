"""Writes what spec.gateway asks for. Neither its absence nor a refusal keeps anything else from being done."""

from __future__ import annotations

from modelserve_operator.apply import Applier, NameTakenError, PredecessorError, UnfitError
from modelserve_operator.decision import Decision
from modelserve_operator.drift import DriftContestedError
from modelserve_operator.kinds import HTTP_ROUTE, INFERENCE_POOL
from modelserve_operator.kube import KubeError
from modelserve_operator.manifests.gateway_objects import http_route, inference_pool
from modelserve_operator.observed import Observed
from modelserve_operator.rollout import Step
from modelserve_operator.routed import RefusedRoute


class GatewayRoutes:
    """The HTTPRoute and the InferencePool of each ModelServe."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def apply(self, observed: Observed, decision: Decision, step: Step) -> RefusedRoute | None:
        """Have them, once there is a Service, or have none. Raises nothing."""
        if decision.spec is None:
            return None
        asked = decision.spec.gateway
        picker = asked.endpoint_picker if asked is not None else None
        try:
            if picker is not None and step.serve is not None and INFERENCE_POOL not in observed.not_served:
                selected = None if step.shared else step.serve
                pool = inference_pool(observed.model_serve, picker, plan_hash=selected)
                await self._applier.apply(INFERENCE_POOL, pool)
            if asked is not None and step.serve is not None and HTTP_ROUTE not in observed.not_served:
                await self._applier.apply(HTTP_ROUTE, http_route(observed.model_serve, asked))
            # A pool goes after the route that led there leads elsewhere.
            if asked is None and observed.http_route is not None:
                await self._applier.delete(HTTP_ROUTE, observed.http_route)
            if picker is None and observed.inference_pool is not None:
                await self._applier.delete(INFERENCE_POOL, observed.inference_pool)
        except (PredecessorError, NameTakenError, DriftContestedError, UnfitError, KubeError) as error:
            return RefusedRoute(str(error))
        return None
