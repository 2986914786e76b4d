"""Workers that keep failing without ending for good: crash loops, and images that cannot be pulled. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from modelserve_operator.observed import Pod
from modelserve_operator.reasons import Reason

MOST_RESTARTS = 5
PULL_PATIENCE = timedelta(minutes=5)
LONG_RUN = timedelta(minutes=10)  # after which the kubelet, too, begins its back-off anew


def stuck(pods: Iterable[Pod], now: datetime) -> tuple[Reason, Pod] | None:
    """The first worker that is not expected to get ready by itself, and why."""
    for pod in pods:
        if pod.ready or pod.terminating:
            continue
        unready = now - pod.unready_since if pod.unready_since else timedelta(0)
        if pod.pull_fails and unready >= PULL_PATIENCE:
            return Reason.IMAGE_PULL_FAILED, pod
        if pod.crashes >= MOST_RESTARTS and not pod.started and (pod.last_run < LONG_RUN or unready >= LONG_RUN):
            return Reason.CRASH_LOOP, pod
    return None


def patience_left(pods: Iterable[Pod], now: datetime) -> float | None:
    """Seconds until the first of them is taken for stuck by time alone: no event will come then."""
    failing = (pod for pod in pods if pod.pull_fails and not pod.ready and not pod.terminating and pod.unready_since)
    left = [(pod.unready_since + PULL_PATIENCE - now).total_seconds() for pod in failing if pod.unready_since]
    return min((seconds for seconds in left if seconds > 0), default=None)
