"""The ResourceClaimTemplate of a revision whose GPUs are asked for by dynamic resource allocation."""

from __future__ import annotations

from typing import Any

from modelserve.planning.pools.resource_slices import device_selector, is_device_class
from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.observed.snapshot import Body
from modelserve_operator.revisions.revision import Revision

CLAIM = "gpus"  # name of the claim inside the pod, and of its one request


def claim_template(model_serve: Body, revision: Revision) -> dict[str, Any] | None:
    """NAME-HASH: each pod gets a claim of its own for all GPUs of its replica, of the product that was planned; None
    where pods ask for an extended resource, or for no GPU.
    """
    plan = revision.plan
    if not is_device_class(plan.resource_name) or plan.accelerator is None:
        return None
    exactly = {
        "deviceClassName": plan.resource_name,
        "allocationMode": "ExactCount",
        "count": plan.gpus_per_replica,
        "selectors": [{"cel": {"expression": device_selector(plan.accelerator)}}],
    }
    name = labels.revision_name(model_serve["metadata"]["name"], revision.hash)
    metadata = child_metadata(
        model_serve, name=name, component=labels.REVISION, extra_labels={labels.PLAN_HASH: revision.hash}
    )
    return {"metadata": metadata, "spec": {"spec": {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}}}


def ask_by_claim(pod: dict[str, Any], worker: dict[str, Any], template: str) -> None:
    """Have the worker's container use the devices of a claim that is made of the template."""
    pod["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": template}]
    worker["resources"] = {**worker["resources"], "claims": [{"name": CLAIM}]}
