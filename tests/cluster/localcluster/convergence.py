"""Is a ModelServe as it should be: its workers, its endpoints, and one child of each kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localcluster.deployment import Deployed
from localcluster.kubectl import wait_for
from localcluster.settings import ClusterError
from localcluster.target import Target

Body = dict[str, Any]


def worker_pods(served: Deployed) -> dict[str, Body]:
    """Worker pods that are not on their way out, by uid."""
    return _staying(served.owned("pods"))


def _staying(pods: Iterable[Body]) -> dict[str, Body]:
    return {
        pod["metadata"]["uid"]: pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and "job-name" not in pod["metadata"]["labels"]
    }


def restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))


def workers_of(cluster: Target) -> dict[str, tuple[str, int]]:
    """Worker pods of every ModelServe of the cluster: uid and restarts by name."""
    pods = cluster.kubectl.items("pods", "--all-namespaces", "-l", "app.kubernetes.io/component=worker")
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], restarts(pod))
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def ready_endpoints(served: Deployed) -> set[str]:
    """uids of the pods that are ready endpoints of the Service."""
    return _ready(_slices(served))


def ready_addresses(served: Deployed) -> set[str]:
    """Addresses of the same pods."""
    return {address for each in _ready_ones(_slices(served)) for address in each["addresses"]}


def _slices(served: Deployed) -> list[Body]:
    return served.kubectl.items("endpointslices", "-l", f"kubernetes.io/service-name={served.name}")


def _ready_ones(slices: Iterable[Body]) -> list[Body]:
    endpoints = [each for body in slices for each in body.get("endpoints") or ()]
    return [each for each in endpoints if each["conditions"].get("ready")]


def _ready(slices: Iterable[Body]) -> set[str]:
    return {each["targetRef"]["uid"] for each in _ready_ones(slices)}


def wait_converged(served: Deployed, replicas: int, *, timeout_s: float = 600.0) -> None:
    """Ready, every worker an endpoint, one child of each kind, and nothing left of what was before.

    Raises ClusterError with what is too many or missing.
    """
    served.wait_ready(timeout_s=timeout_s)

    def whole() -> bool:
        listed = served.owned("deployments,pods,endpointslices")  # at once: kubectl's seconds are the workers', too
        deployments, pods, slices = (
            [each for each in listed if each["kind"] == kind] for kind in ("Deployment", "Pod", "EndpointSlice")
        )
        pods = [pod for pod in pods if "job-name" not in pod["metadata"]["labels"]]
        workers = _staying(pods)
        return (
            [each["spec"]["replicas"] for each in deployments] == [replicas]
            and len(pods) == len(workers) == replicas
            and _ready(slices) == workers.keys()
        )

    wait_for(f"{served.name}: one Deployment of {replicas} workers and no other", whole, timeout_s=timeout_s)
    for kind in ("services", "poddisruptionbudgets"):
        if (found := len(served.owned(kind))) != 1:
            raise ClusterError(f"{served.name} has {found} {kind}")
    if stalled := served.condition("Stalled"):
        raise ClusterError(f"{served.name} is ready and Stalled: {stalled['reason']}: {stalled['message']}")
