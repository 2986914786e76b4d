"""Which nodes let the pods of a spec in: lasting taints against tolerations, labels against the node selector. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.api.spec import ModelServeSpec
from modelserve.hardware import GPU_RESOURCE
from modelserve.planning.pools.bodies import mapping

GPU_TOLERATION = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
"""The taint that GPU nodes usually carry; pods that ask for GPUs tolerate it without being told."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
_KEEPING_AWAY = ("NoSchedule", "NoExecute")
# Keys of taints that come and go; one that ends in a slash stands for all that begin so.
STARTING_TAINTS = (
    "node.kubernetes.io/",  # not-ready, unreachable, unschedulable, pressure
    "node.cloudprovider.kubernetes.io/uninitialized",
    "karpenter.sh/unregistered",
    "node.cilium.io/agent-not-ready",
    "ebs.csi.aws.com/agent-not-ready",
    "efs.csi.aws.com/agent-not-ready",
    "startup-taint.cluster-autoscaler.kubernetes.io/",  # by Cluster Autoscaler's own convention, as the next two
    "status-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
)
LEAVING_TAINTS = (
    "karpenter.sh/disrupted",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/",
)
"""Of nodes whose pods will have to go."""

Body = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Taint:
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        """As kubectl writes it: KEY=VALUE:EFFECT."""
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"

    def tolerated(self, tolerations: Iterable[Body]) -> bool:
        """Kubernetes' rule: an empty key with Exists tolerates all, an empty effect every effect."""
        for toleration in tolerations:
            key, effect = toleration.get("key"), toleration.get("effect")
            if key not in (None, "", self.key) or effect not in (None, "", self.effect):
                continue
            if toleration.get("operator") == "Exists" or (key and (toleration.get("value") or "") == self.value):
                return True
        return False


def named(key: object, keys: Iterable[str]) -> bool:
    """Whether one of `keys`, as of STARTING_TAINTS, stands for the key of a taint."""
    return any(str(key).startswith(each) if each.endswith("/") else key == each for each in keys)


def lasting_taints(spec: object, *, passing: Iterable[str] = ()) -> tuple[Taint, ...]:
    """Taints of a node's spec (or of a NodePool's template) that keep pods away for as long as it lives. `passing`:
    keys of those that do not, beside the well-known ones."""
    passes = (*STARTING_TAINTS, *LEAVING_TAINTS, *passing)
    stated = spec.get("taints") if isinstance(spec, Mapping) else None
    return tuple(
        sorted(
            Taint(str(taint.get("key")), str(taint.get("value") or ""), taint["effect"])
            for taint in (stated if isinstance(stated, list | tuple) else ())
            if isinstance(taint, Mapping) and taint.get("effect") in _KEEPING_AWAY
            and not named(taint.get("key"), passes)
        )
    )  # fmt: skip


def gpu_tolerations(spec: ModelServeSpec) -> list[dict[str, Any]]:
    """Tolerations of pods that ask for GPUs."""
    return [GPU_TOLERATION, *(toleration.to_json() for toleration in spec.pod.tolerations)]


def node_selector(spec: ModelServeSpec) -> Mapping[str, str]:
    """Labels that a node must have."""
    return spec.accelerators.node_selector if spec.accelerators else {}


def selects(terms: object, labels: Mapping[str, str], *, name: str) -> bool:
    """Whether a required node affinity lets pods onto a node: Kubernetes' rule for nodeSelectorTerms. Terms are
    alternatives, one without expressions selects nothing, and an operator that nobody knows does not hold.
    """
    for term in terms if isinstance(terms, list | tuple) else ():
        by_label, by_field = (mapping(term).get(key) or () for key in ("matchExpressions", "matchFields"))
        if not by_label and not by_field:
            continue
        fields = {"metadata.name": name}
        if all(_holds(each, labels) for each in by_label) and all(_holds(each, fields) for each in by_field):
            return True
    return False


def _holds(expression: object, values: Mapping[str, str]) -> bool:
    stated = mapping(expression)
    found, wanted = values.get(str(stated.get("key"))), [str(each) for each in stated.get("values") or ()]
    match stated.get("operator"):
        case "In":
            return found in wanted
        case "NotIn":
            return found not in wanted
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt" as operator if len(wanted) == 1:
            try:
                left, right = int(str(found)), int(wanted[0])
            except ValueError:
                return False
            return left > right if operator == "Gt" else left < right
    return False


def unmet(
    labels: Body, taints: Iterable[Taint], *, selector: Mapping[str, str], tolerations: Iterable[Body]
) -> Iterator[str]:
    """What keeps pods with this selector and these tolerations off a node, in words; nothing where they may run."""
    allowed = tuple(tolerations)
    for taint in taints:
        if not taint.tolerated(allowed):
            yield f"taint {taint} is not in spec.pod.tolerations"
    for key, value in selector.items():
        if labels.get(key) != value:
            yield f"label {key} is {labels.get(key, 'absent')}, spec.accelerators.nodeSelector wants {value}"
