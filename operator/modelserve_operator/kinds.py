"""The Kubernetes resources the operator touches, and the access it needs to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelserve_operator import labels


@dataclass(frozen=True)
class ResourceKind:
    """One resource of the API. `owned`: children that carry our labels and are watched by them."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    owned: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, *, subresource: str | None = None) -> str:
        """URL path of the collection (no name) or of one object."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/" + "/".join(parts)


MODEL_SERVE = ResourceKind(labels.GROUP, "v1alpha1", "modelserves", "ModelServe", owned=False)
NODE = ResourceKind("", "v1", "nodes", "Node", namespaced=False, owned=False)
DEPLOYMENT = ResourceKind("apps", "v1", "deployments", "Deployment")
SERVICE = ResourceKind("", "v1", "services", "Service")
CONFIG_MAP = ResourceKind("", "v1", "configmaps", "ConfigMap")
DISRUPTION_BUDGET = ResourceKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
JOB = ResourceKind("batch", "v1", "jobs", "Job")
POD = ResourceKind("", "v1", "pods", "Pod")
ENDPOINT_SLICE = ResourceKind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")  # the Service's labels
CLAIM = ResourceKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", owned=False)
EVENT = ResourceKind("", "v1", "events", "Event", owned=False)
NODE_POOL = ResourceKind("karpenter.sh", "v1", "nodepools", "NodePool", namespaced=False, owned=False)

CHILDREN = (DEPLOYMENT, SERVICE, CONFIG_MAP, DISRUPTION_BUDGET, JOB, POD, ENDPOINT_SLICE)
WATCHED = (*CHILDREN, NODE, MODEL_SERVE)  # listed in this order: a ModelServe is known only after all of its children

OPTIONAL = (NODE_POOL,)  # not every cluster has the kind, nor has every operator leave to read it

_READ = ("get", "list", "watch")
_WRITE = (*_READ, "create", "patch", "delete")

NAMESPACED_RULES: tuple[dict[str, Any], ...] = (
    {"apiGroups": [labels.GROUP], "resources": ["modelserves"], "verbs": list(_READ)},
    {"apiGroups": [labels.GROUP], "resources": ["modelserves/status"], "verbs": ["patch"]},
    # blockOwnerDeletion is only admitted to those who may update the owner's finalizers; none is ever set.
    {"apiGroups": [labels.GROUP], "resources": ["modelserves/finalizers"], "verbs": ["update"]},
    {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": list(_WRITE)},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": list(_WRITE)},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": list(_WRITE)},
    {"apiGroups": [""], "resources": ["services", "configmaps"], "verbs": list(_WRITE)},
    {"apiGroups": [""], "resources": ["pods"], "verbs": list(_READ)},
    {"apiGroups": [ENDPOINT_SLICE.group], "resources": [ENDPOINT_SLICE.plural], "verbs": list(_READ)},
    {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]},  # only with worker access api-proxy
    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
)
"""RBAC rules in the watched namespaces."""

CLUSTER_RULES: tuple[dict[str, Any], ...] = (
    {"apiGroups": [""], "resources": ["nodes"], "verbs": list(_READ)},
    {"apiGroups": [""], "resources": ["namespaces"], "verbs": list(_READ)},
    {"apiGroups": [NODE_POOL.group], "resources": [NODE_POOL.plural], "verbs": list(_READ)},
    {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": list(_READ)},
)
"""RBAC rules that only a ClusterRole can give; namespaces and definitions are what kopf itself looks at.

Without the rule for NodePools, pools that have no node yet are unknown; nothing else is lost.
"""
