"""Nodes that a cloud takes back at short notice, and workers that take longer than that to stop. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.planning.pools.eligibility import gpu_tolerations, node_selector, selects
from modelserve_operator.inventory.pools import Pool
from modelserve_operator.manifests.worker_template import EXIT_SECONDS, SHUTDOWN_DELAY_SECONDS

NOTICE_SECONDS = {  # by label of a node: from the cloud's notice until it is gone, as each cloud documents it
    ("karpenter.sh/capacity-type", "spot"): 120,
    ("eks.amazonaws.com/capacityType", "SPOT"): 120,
    ("cloud.google.com/gke-spot", "true"): 30,
    ("cloud.google.com/gke-preemptible", "true"): 30,
    ("kubernetes.azure.com/scalesetpriority", "spot"): 30,
}


def short_notice(spec: ModelServeSpec, plan: PlanStatus, pools: Iterable[Pool]) -> str | None:
    """What a reclaim cuts where a plan may run on such nodes; None where workers stop in time."""
    least = SHUTDOWN_DELAY_SECONDS + EXIT_SECONDS
    grace = least + spec.rollout.drain_seconds
    terms = [term.to_json() for term in plan.node_selector_terms or ()]
    selector, tolerations = node_selector(spec), gpu_tolerations(spec)
    labels = {
        label
        for pool in pools
        if selects(terms, dict(pool.labels), name="")
        and not any(pool.unmet(selector=selector, tolerations=tolerations))
        for label in pool.labels
    }
    short = sorted(
        (seconds, *label) for label, seconds in NOTICE_SECONDS.items() if label in labels and grace > seconds
    )
    if not short:
        return None
    seconds, key, value = short[0]
    return (
        f"Workers may run on nodes with {key}={value}, which are gone {seconds} s after their notice, and take up to "
        f"{grace} s to stop: streams that go on for longer are cut. Set rollout.drainSeconds to "
        f"{max(0, seconds - least)}, or keep them off with accelerators.nodeSelector"
    )
