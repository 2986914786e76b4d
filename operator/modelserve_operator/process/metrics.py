"""The operator's own metrics, in its own registry."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

RECONCILES = Counter("modelserve_operator_reconciles", "Reconciles of a ModelServe.", ["outcome"], registry=REGISTRY)
for _outcome in ("ok", "error"):  # there from the start: an increase is computed from the first scrape on
    RECONCILES.labels(_outcome)
RECONCILE_SECONDS = Histogram("modelserve_operator_reconcile_seconds", "Duration of one reconcile.", registry=REGISTRY)
QUEUE_SECONDS = Histogram(
    "modelserve_operator_queue_seconds", "How long a key waited for its reconcile.", registry=REGISTRY
)
QUEUE_DEPTH = Gauge("modelserve_operator_queue_depth", "Keys waiting for a reconcile.", registry=REGISTRY)
WRITES = Counter("modelserve_operator_writes", "Objects written.", ["verb", "kind"], registry=REGISTRY)
API_REQUESTS = Counter(
    "modelserve_operator_api_requests", "Requests to the API server.", ["method", "kind"], registry=REGISTRY
)
WATCH_EVENTS = Counter("modelserve_operator_watch_events", "Watch events received.", ["kind"], registry=REGISTRY)
LEADER = Gauge(
    "modelserve_operator_leader", "1: this operator reconciles; 0: it waits for another one's lease.", registry=REGISTRY
)
ADAPTERS = Gauge(
    "modelserve_operator_adapters",
    "ModelAdapters that refer to a ModelServe: there, and ready, which all of its workers serve as their specs say.",
    ["namespace", "name", "state"],
    registry=REGISTRY,
)
CACHES = Gauge(
    "modelserve_operator_caches",
    "ModelCaches: there, and filled, which ModelServes can read.",
    ["state"],
    registry=REGISTRY,
)
HALTED_MOVES = Gauge(
    "modelserve_operator_halted_moves",
    "ModelServes that do not move to the newer worker because it fails where it was tried.",
    registry=REGISTRY,
)
REVIEWS = Counter("modelserve_webhook_reviews", "Admission reviews answered.", ["outcome"], registry=REGISTRY)
REVIEW_SECONDS = Histogram(
    "modelserve_webhook_review_seconds",
    "From a review's body to its answer.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    registry=REGISTRY,
)


def show_adapters(key: tuple[str, str], there: int, ready: int) -> None:
    """Of one ModelServe."""
    for state, count in (("there", there), ("ready", ready)):
        ADAPTERS.labels(*key, state).set(count)


def show_caches(there: int, filled: int) -> None:
    """Of all namespaces; without a call there are no series: none are kept."""
    for state, count in (("there", there), ("filled", filled)):
        CACHES.labels(state).set(count)


def forget_adapters(key: tuple[str, str]) -> None:
    """No adapter refers to the ModelServe any more."""
    for state in ("there", "ready"):
        with contextlib.suppress(KeyError):
            ADAPTERS.remove(*key, state)
