"""What the status of a ModelServe says, as metrics: for alerts, dashboards and autoscalers.

Kept as numbers per ModelServe and put into words at a scrape: a reconcile costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from modelserve_operator.cluster.store import shown_speed
from modelserve_operator.process.metrics import REGISTRY

Body = Mapping[str, Any]
Series = tuple[str, tuple[str, ...], float]  # name of a gauge, its labels after namespace and name, value

SIZING_ERROR = "modelserve_sizing_error_ratio"
SPEED_ERROR = "modelserve_speed_error_ratio"
CONDITION = "modelserve_condition"
REPLICAS = "modelserve_replicas"
WAITS = "modelserve_proposal_waits"
TARGET_CONCURRENCY = "modelserve_target_concurrency"
POOL_BYTES = "modelserve_planned_pool_bytes"
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    SIZING_ERROR: (
        "(measured - predicted) / predicted bytes of a memory term, of the ready worker whose pool fell shortest.",
        ("accelerator", "term"),
    ),
    SPEED_ERROR: (
        "(measured - expected) / expected time of steps, as status.calibration.speed shows it.",
        ("accelerator", "kind"),
    ),
    CONDITION: ("1 while the condition is True, else 0.", ("type", "reason")),
    WAITS: ("1 while another plan, or another worker alone, is proposed and not committed.", ("kind",)),
    REPLICAS: ("Worker pods: desired, there, ready.", ("state",)),
    TARGET_CONCURRENCY: (
        "Requests that one replica is planned to answer at once, under spec.workload: the aim of an autoscaler.",
        ("accelerator",),
    ),
    POOL_BYTES: ("KV pool of one GPU as planned.", ("accelerator",)),
}
SHOWN_CONDITIONS = ("Ready", "Available", "CapacityAvailable", "Stalled")


class _Statuses(Collector):
    """The series of every ModelServe. Read in the thread of a scrape, written in the loop's."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], tuple[Series, ...]] = {}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        for name, (documentation, labels) in _GAUGES.items():
            yield GaugeMetricFamily(name, documentation, labels=("namespace", "name", *labels))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = {family.name: family for family in self.describe()}
        for who, series in tuple(self.series.items()):
            for name, labels, value in series:
                families[name].add_metric((*who, *labels), value)
        yield from families.values()


_STATUSES = _Statuses()
REGISTRY.register(_STATUSES)


def show(namespace: str, name: str, status: Body, *, desired: int) -> None:
    """Set every gauge of one ModelServe to what its status says; series that are gone are removed."""
    _STATUSES.series[namespace, name] = tuple(_series(status, desired))


def forget(namespace: str, name: str) -> None:
    """A ModelServe is gone."""
    _STATUSES.series.pop((namespace, name), None)


def _series(status: Body, desired: int) -> Iterator[Series]:
    plan = status.get("plan") or {}
    accelerator = plan.get("accelerator") or ""
    for term in (status.get("calibration") or {}).get("terms") or ():
        if "errorPercent" in term:
            yield SIZING_ERROR, (accelerator, term["name"]), float(term["errorPercent"]) / 100
    for speed in shown_speed(status):
        yield SPEED_ERROR, (accelerator, speed["kind"]), float(speed["errorPercent"]) / 100
    found = {each["type"]: each for each in status.get("conditions") or ()}
    for kind in SHOWN_CONDITIONS:  # one that is gone is not True
        condition = found.get(kind) or {}
        yield CONDITION, (kind, condition.get("reason", "")), float(condition.get("status") == "True")
    yield REPLICAS, ("desired",), desired
    yield REPLICAS, ("there",), status.get("replicas") or 0
    yield REPLICAS, ("ready",), status.get("readyReplicas") or 0
    for kind in ("Plan", "Worker"):
        yield WAITS, (kind,), float(status.get("waits") == kind)
    if (target := target_concurrency(plan)) is not None:
        yield TARGET_CONCURRENCY, (accelerator,), target
    if (memory := plan.get("perGpu")) is not None:
        yield POOL_BYTES, (accelerator,), memory["kvPoolBytes"]


def target_concurrency(plan: Body) -> int | None:
    """What the plan states. One of a release that stated nothing: the concurrency of its expected speed, else what the
    pool holds of 8,192 tokens each, or of maxModelLen; at least one, at most what a step takes. None: no plan.
    """
    if (stated := plan.get("targetConcurrency")) is not None:
        return int(stated)
    chosen: Body = next((each for each in plan.get("candidates") or () if each.get("verdict") == "Chosen"), {})
    held = plan.get("concurrency") or {}
    figure = (chosen.get("speed") or {}).get("concurrency") or held.get("at8k") or held.get("atMax")
    if figure is None:
        return None
    most = (plan.get("engine") or {}).get("maxNumSeqs") or int(Decimal(figure))
    return max(1, min(int(Decimal(figure)), most))
