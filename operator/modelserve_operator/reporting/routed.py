"""The condition Routed: whether gateways lead requests to a ModelServe, in their own words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve_operator.cluster.kinds import HTTP_ROUTE, INFERENCE_POOL
from modelserve_operator.observed.snapshot import Body, Observed
from modelserve_operator.planning.decision import Decision, Finding
from modelserve_operator.reasons import Reason

_SETTLED = ("Accepted", "ResolvedRefs")


@dataclass(frozen=True)
class RefusedRoute:
    """Why the route or its pool could not be written: the rest of the ModelServe does not wait for them.

    `selects_others`: the pool still selects workers of another revision than the one that serves; they stay.
    """

    message: str
    selects_others: bool = False


def routed(observed: Observed, decision: Decision, refused: RefusedRoute | None) -> Finding | None:
    """The condition; None where the spec asks for no route."""
    if decision.spec is None or decision.spec.gateway is None:
        return None
    picked = decision.spec.gateway.endpoint_picker is not None
    wanted = (HTTP_ROUTE, INFERENCE_POOL) if picked else (HTTP_ROUTE,)
    missing = [f"{each.kind} ({each.api_version})" for each in wanted if each in observed.not_served]
    if missing:
        message = (
            f"The cluster serves no {' and no '.join(missing)}, or the operator may not list it: install the CRD of "
            "the Gateway API or of its inference extension."
        )
        return Finding(False, Reason.GATEWAY_NOT_SERVED, message)
    if refused is not None:
        return Finding(False, Reason.ROUTE_REFUSED, refused.message)
    if observed.http_route is None:
        return Finding(None, Reason.ROUTE_NOT_TAKEN_UP, "The route is written once a revision serves.")
    told = [("HTTPRoute", each) for each in _told(observed.http_route)]
    if picked:
        told += [("InferencePool", each) for each in _told(observed.inference_pool or {})]
    for kind, each in told:
        if each["type"] in _SETTLED and each["status"] == "False":
            words = f"{kind}: {each['type']} is False ({each.get('reason')}): {each.get('message', '')}"
            return Finding(False, Reason.ROUTE_NOT_ACCEPTED, words)
    asked = len(decision.spec.gateway.parent_refs)
    accepted = sum(
        kind == "HTTPRoute" and each["type"] == "Accepted" and each["status"] == "True" for kind, each in told
    )
    if accepted < asked:
        message = f"{accepted} of {asked} gateways have accepted HTTPRoute {observed.name}: does a controller run them?"
        return Finding(None, Reason.ROUTE_NOT_TAKEN_UP, message)
    return Finding(
        True, Reason.ROUTE_ACCEPTED, f"{accepted} of {asked} gateways have accepted HTTPRoute {observed.name}."
    )


def _told(body: Body) -> Iterator[Mapping[str, Any]]:
    """What gateways say of the object as it is now: conditions of an earlier generation are left out."""
    generation = (body.get("metadata") or {}).get("generation")
    for parent in (body.get("status") or {}).get("parents") or ():
        for each in parent.get("conditions") or ():
            if each.get("observedGeneration", generation) == generation:
                yield each
