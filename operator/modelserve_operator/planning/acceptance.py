"""Decides whether a valid spec is accepted, by rules of the installation and what it names in its namespace. Pure."""

from __future__ import annotations

from modelserve.api import ModelServeSpec
from modelserve_operator.allowed import not_allowed
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.decision import Finding
from modelserve_operator.reasons import Reason
from modelserve_operator.settings import Settings


def acceptable(spec: ModelServeSpec, observed: Observed, settings: Settings) -> Finding:
    """Whether the installation allows it, and claims may be in as many pods as it takes."""
    excess = not_allowed(spec, observed.namespace, settings.allowed)
    if excess is not None:
        return Finding(False, Reason.NOT_ALLOWED, f"{excess}.")
    pods = spec.replicas + spec.rollout.max_surge
    for claim, modes in observed.claim_modes.items():
        shareable = modes is None or {"ReadOnlyMany", "ReadWriteMany"} & set(modes)
        if pods > 1 and not shareable:
            message = (
                f"claim {claim} is {', '.join(modes or ())}, but replicas {spec.replicas} and rollout.maxSurge "
                f"{spec.rollout.max_surge} need it in {pods} pods at a time; use a ReadOnlyMany or ReadWriteMany "
                "claim, or replicas 1 with rollout {maxSurge: 0, allowDowntime: true}"
            )
            return Finding(False, Reason.VOLUME_NOT_SHAREABLE, message)
    return Finding(True, Reason.VALID, "The spec is valid.")
