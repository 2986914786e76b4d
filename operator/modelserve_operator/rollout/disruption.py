"""Chooses which workers an autoscaler may end of its own accord: not one that loads, and not the only one. Pure.

Annotations of the pods say so, from their birth on, to Karpenter and to Cluster Autoscaler. What people do is not
theirs to stop: a drain evicts by the disruption budget. And a node that goes anyway must not wait for ever for a pod
that nobody moves, as Karpenter's would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelserve_operator.labels import DO_NOT_DISRUPT, HELD, SAFE_TO_EVICT
from modelserve_operator.observed.snapshot import Observed, Pod
from modelserve_operator.sources import surges_first

HELD_BACK = {HELD: "true", DO_NOT_DISRUPT: "true", SAFE_TO_EVICT: "false"}
LET_GO: Mapping[str, str | None] = {HELD: "false", DO_NOT_DISRUPT: None, SAFE_TO_EVICT: "true"}
"""Cluster Autoscaler has to be told: it spares pods with local storage, and that of a worker holds nothing."""


def at_birth(users: Mapping[str, str]) -> dict[str, str]:
    """Annotations of a worker's template: the user's alone where they say anything of this."""
    return dict(users) if users.keys() & {DO_NOT_DISRUPT, SAFE_TO_EVICT} else {**HELD_BACK, **users}


def changes(observed: Observed, *, replicas: int | None) -> Iterator[tuple[Pod, Mapping[str, str | None]]]:
    """Workers whose annotations no longer say what is right, with those that do; None: not there at all.

    Pods without our mark were made by an earlier release, or are the user's business.
    """
    moved_by_us = surges_first(observed.model_serve)
    stay = [pod for pod in observed.workers if pod.ready and pod.uid not in observed.to_move]
    for pod in observed.workers:
        if pod.held is None or not pod.placed:
            continue
        others = any(each.uid != pod.uid for each in stay)
        one_of_several = pod.ready and others and (replicas or 0) > 1
        let_go = one_of_several or (pod.uid in observed.to_move and not moved_by_us)
        if let_go == pod.held:
            yield pod, LET_GO if let_go else HELD_BACK
