"""The CapacityBuffer of a ModelServe: when there is one, and what its autoscaler says of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.planning.pools.resource_slices import is_device_class
from modelserve_operator.observed.snapshot import Body, Observed
from modelserve_operator.planning.decision import Decision, Finding
from modelserve_operator.reasons import Reason
from modelserve_operator.rollout.next_step import RunningRevision

RunningRevisions = Mapping[str, RunningRevision]


@dataclass(frozen=True)
class RefusedBuffer:
    """Why the CapacityBuffer could not be written: the rest of the ModelServe does not wait for it."""

    message: str


def withheld(decision: Decision, running: RunningRevisions, *, there: bool) -> str | None:
    """Why there is no buffer now although the spec asks for one; None where there is, or nobody knows yet.

    `there`: it exists already, for this plan or one before it.
    """
    target = decision.target
    if target is None:
        return "no plan is committed" if decision.planned.ok is not None else None
    if is_device_class(target.plan.resource_name):
        return "its workers ask for GPUs by a claim, which a placeholder has not"
    runs = running.get(target.hash)
    if decision.spec is not None and decision.spec.replicas and (runs is None or not runs.ready) and not there:
        return "no worker of the plan has been ready yet, and room for more that fail would be paid for nothing"
    # Also while an attempt is under way: else each attempt would have an autoscaler bring nodes for the buffer as well.
    if runs is not None and (runs.failing or (runs.record is not None and runs.ready < runs.replicas)):
        return "workers of the plan fail, and room for more of them would not help"
    return None


def proven(decision: Decision, running: RunningRevisions) -> bool:
    """Whether the plan has a ready worker, or none is wanted: until then the room stays of the shape that it has."""
    target, spec = decision.target, decision.spec
    runs = running.get(target.hash) if target is not None else None
    return (runs is not None and runs.ready > 0) or (spec is not None and spec.replicas == 0)


def buffered(
    observed: Observed, decision: Decision, running: RunningRevisions, refused: RefusedBuffer | None
) -> Finding | None:
    """The condition CapacityBuffered; None where the spec asks for no buffer."""
    if decision.spec is None or decision.spec.capacity_buffer is None:
        return None
    if observed.buffer_kind is None:
        message = (
            "The cluster serves no CapacityBuffer (autoscaling.x-k8s.io), or the operator may not list it: install "
            "its CRD, and switch it on in the autoscaler."
        )
        return Finding(False, Reason.BUFFER_NOT_SERVED, message)
    why = withheld(decision, running, there=observed.capacity_buffer is not None)
    if why is not None:
        return Finding(False, Reason.BUFFER_WITHHELD, f"There is no CapacityBuffer: {why}.")
    if refused is not None:
        return Finding(False, Reason.BUFFER_REFUSED, refused.message)
    body = observed.capacity_buffer or {}
    return _as_the_autoscaler_says(body.get("status") or {}, observed.name)


def _as_the_autoscaler_says(status: Body, name: str) -> Finding:
    states = {each["type"]: each for each in status.get("conditions") or ()}
    if not states:
        message = f"No autoscaler has taken up CapacityBuffer {name}: is it switched on there?"
        return Finding(None, Reason.BUFFER_NOT_TAKEN_UP, message)
    limited, ready, held = (states.get(kind) for kind in ("LimitedByQuotas", "ReadyForProvisioning", "Provisioning"))
    if limited is not None and limited["status"] == "True":
        return Finding(False, Reason.LIMITED_BY_QUOTAS, _told(limited))
    if ready is not None and ready["status"] == "False":
        return Finding(False, Reason.BUFFER_NOT_READY, _told(ready))
    if held is None or held["status"] != "True":
        return Finding(False if held else None, Reason.BUFFER_PROVISIONING, _told(held or ready or {}))
    room = status.get("replicas")
    return Finding(True, Reason.BUFFER_PROVISIONED, f"There is room for {room} more workers: {_told(held)}")


def _told(condition: Mapping[str, Any]) -> str:
    """A condition of the autoscaler in its own words."""
    message = f"{condition.get('type')} is {condition.get('status')} ({condition.get('reason')})"
    return f"{message}: {condition['message']}" if condition.get("message") else f"{message}."
