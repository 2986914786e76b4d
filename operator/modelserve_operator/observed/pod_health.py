"""Finds pods that fail on without ending for good: crash loops, images that cannot be pulled, failing mounts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from modelserve_operator.observed.snapshot import Pod
from modelserve_operator.reasons import Reason

MOST_RESTARTS = 5
PULL_PATIENCE = timedelta(minutes=5)
MAKING_PATIENCE = timedelta(minutes=1)  # volumes and network of a pod; Kubernetes tries again by itself meanwhile
MAKING_LOOKS = timedelta(minutes=1)  # between two questions for the cause
LONG_RUN = timedelta(minutes=10)  # after which the kubelet, too, begins its back-off anew


def stuck(pods: Iterable[Pod], now: datetime) -> tuple[Reason, Pod] | None:
    """The first pod that is not expected to get ready by itself, and why."""
    for pod in pods:
        if pod.ready or pod.terminating:
            continue
        unready = now - pod.unready_since if pod.unready_since else timedelta(0)
        if hangs(pod, now) and (pod.making_fails or pod.trouble is not None):
            return Reason.POD_NOT_STARTING, pod
        if pod.pull_fails and unready >= PULL_PATIENCE:
            return Reason.IMAGE_PULL_FAILED, pod
        if pod.crashes >= MOST_RESTARTS and not pod.started and (pod.last_run < LONG_RUN or unready >= LONG_RUN):
            return Reason.CRASH_LOOP, pod
    return None


def hangs(pod: Pod, now: datetime) -> bool:
    """Whether it has had a node for longer than volumes and network take, and still no container has begun."""
    if not (pod.making or pod.making_fails) or pod.terminating or pod.ended:
        return False
    return pod.placed_since is None or now - pod.placed_since >= MAKING_PATIENCE


def patience_left(pods: Iterable[Pod], now: datetime) -> float | None:
    """Seconds until one of them is to be looked at again by time alone: no event will come then."""
    left = [seconds for pod in pods if not pod.ready and not pod.terminating for seconds in _patience(pod, now)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _patience(pod: Pod, now: datetime) -> Iterator[float]:
    if pod.pull_fails and pod.unready_since:
        yield (pod.unready_since + PULL_PATIENCE - now).total_seconds()
    if hangs(pod, now):
        yield MAKING_LOOKS.total_seconds()
    elif (pod.making or pod.making_fails) and pod.placed_since:
        yield (pod.placed_since + MAKING_PATIENCE - now).total_seconds()
