"""What the status of a ModelServe says, as metrics: for alerts, dashboards and autoscalers."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from prometheus_client import Gauge

from modelserve_operator.metrics import REGISTRY

Body = Mapping[str, Any]

_WHO = ["namespace", "name"]
SIZING_ERROR = Gauge(
    "modelserve_sizing_error_ratio",
    "(measured - predicted) / predicted bytes of a memory term, of the ready worker whose pool fell shortest.",
    [*_WHO, "accelerator", "term"],
    registry=REGISTRY,
)
CONDITION = Gauge(
    "modelserve_condition", "1 while the condition is True, else 0.", [*_WHO, "type", "reason"], registry=REGISTRY
)
REPLICAS = Gauge("modelserve_replicas", "Worker pods: desired, there, ready.", [*_WHO, "state"], registry=REGISTRY)
TARGET_CONCURRENCY = Gauge(
    "modelserve_target_concurrency",
    "Requests that one replica is planned to answer at once, under spec.workload: what an autoscaler should aim at.",
    [*_WHO, "accelerator"],
    registry=REGISTRY,
)
POOL_BYTES = Gauge(
    "modelserve_planned_pool_bytes", "KV pool of one GPU as planned.", [*_WHO, "accelerator"], registry=REGISTRY
)
_ALL = (SIZING_ERROR, CONDITION, REPLICAS, TARGET_CONCURRENCY, POOL_BYTES)
SHOWN_CONDITIONS = ("Ready", "Available", "CapacityAvailable", "Stalled")


def show(namespace: str, name: str, status: Body, *, desired: int) -> None:
    """Set every gauge of one ModelServe to what its status says; series that are gone are removed."""
    forget(namespace, name)
    who = {"namespace": namespace, "name": name}
    plan = status.get("plan") or {}
    accelerator = plan.get("accelerator") or ""
    for term in (status.get("calibration") or {}).get("terms") or ():
        if "errorPercent" in term:
            gauge = SIZING_ERROR.labels(**who, accelerator=accelerator, term=term["name"])
            gauge.set(float(term["errorPercent"]) / 100)
    found = {each["type"]: each for each in status.get("conditions") or ()}
    for kind in SHOWN_CONDITIONS:  # one that is gone is not True
        condition = found.get(kind) or {}
        series = CONDITION.labels(**who, type=kind, reason=condition.get("reason", ""))
        series.set(condition.get("status") == "True")
    pods = {"desired": desired, "there": status.get("replicas") or 0, "ready": status.get("readyReplicas") or 0}
    for state, number in pods.items():
        REPLICAS.labels(**who, state=state).set(number)
    if (target := target_concurrency(plan)) is not None:
        TARGET_CONCURRENCY.labels(**who, accelerator=accelerator).set(target)
    if (memory := plan.get("perGpu")) is not None:
        POOL_BYTES.labels(**who, accelerator=accelerator).set(memory["kvPoolBytes"])


def forget(namespace: str, name: str) -> None:
    """A ModelServe is gone."""
    for gauge in _ALL:
        gauge.remove_by_labels({"namespace": namespace, "name": name})


def target_concurrency(plan: Body) -> int | None:
    """Requests decoded together under the planned workload: at least one, at most what a step takes; None: no plan.

    The roofline's figure where the plan has one; else what the pool holds of 8,192 tokens each, or of maxModelLen.
    """
    chosen: Body = next((each for each in plan.get("candidates") or () if each.get("verdict") == "Chosen"), {})
    held = plan.get("concurrency") or {}
    figure = (chosen.get("speed") or {}).get("concurrency") or held.get("at8k") or held.get("atMax")
    if figure is None:
        return None
    most = (plan.get("engine") or {}).get("maxNumSeqs") or int(Decimal(figure))
    return max(1, min(int(Decimal(figure)), most))
