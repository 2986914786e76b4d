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
MODEL_ADAPTER = ResourceKind(labels.GROUP, "v1alpha1", "modeladapters", "ModelAdapter", owned=False)
MODEL_CACHE = ResourceKind(labels.GROUP, "v1alpha1", "modelcaches", "ModelCache", owned=False)
NODE = ResourceKind("", "v1", "nodes", "Node", namespaced=False, owned=False)
DEPLOYMENT = ResourceKind("apps", "v1", "deployments", "Deployment")
CONTROLLER_REVISION = ResourceKind("apps", "v1", "controllerrevisions", "ControllerRevision")
SERVICE = ResourceKind("", "v1", "services", "Service")
CONFIG_MAP = ResourceKind("", "v1", "configmaps", "ConfigMap")
DISRUPTION_BUDGET = ResourceKind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
JOB = ResourceKind("batch", "v1", "jobs", "Job")
POD = ResourceKind("", "v1", "pods", "Pod")
ENDPOINT_SLICE = ResourceKind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")  # the Service's labels
CLAIM = ResourceKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", owned=False)
EVENT = ResourceKind("", "v1", "events", "Event", owned=False)
LEASE = ResourceKind("coordination.k8s.io", "v1", "leases", "Lease", owned=False)  # the operator's own
NODE_POOL = ResourceKind("karpenter.sh", "v1", "nodepools", "NodePool", namespaced=False, owned=False)
RESOURCE_SLICE = ResourceKind("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False, owned=False)
CLAIM_TEMPLATE = ResourceKind("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
RESOURCE_CLAIM = ResourceKind("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", owned=False)
POD_TEMPLATE = ResourceKind("", "v1", "podtemplates", "PodTemplate")
CAPACITY_BUFFER = ResourceKind("autoscaling.x-k8s.io", "v1beta1", "capacitybuffers", "CapacityBuffer")
CAPACITY_BUFFER_ALPHA = ResourceKind("autoscaling.x-k8s.io", "v1alpha1", "capacitybuffers", "CapacityBuffer")
HTTP_ROUTE = ResourceKind("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
INFERENCE_POOL = ResourceKind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
MODEL_REWRITE = ResourceKind(
    "inference.networking.x-k8s.io", "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"
)
REFERENCE_GRANT = ResourceKind("gateway.networking.k8s.io", "v1beta1", "referencegrants", "ReferenceGrant", owned=False)

DEFINITION = ResourceKind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False, owned=False
)
SECRET = ResourceKind("", "v1", "secrets", "Secret", owned=False)  # of the webhook, the operator, adapters
WEBHOOK_CONFIGURATION = ResourceKind(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
    owned=False,
)

CHILDREN = (CONTROLLER_REVISION, DEPLOYMENT, SERVICE, CONFIG_MAP, DISRUPTION_BUDGET, JOB, POD, ENDPOINT_SLICE)
WATCHED = (*CHILDREN, NODE, MODEL_SERVE)  # listed in this order: a ModelServe is known only after all of its children

OPTIONAL_SUPPLY = (NODE_POOL, RESOURCE_SLICE)  # what plans are made from, beside nodes
OPTIONAL = (
    *OPTIONAL_SUPPLY,
    CLAIM_TEMPLATE,
    POD_TEMPLATE,
    CAPACITY_BUFFER,
    CAPACITY_BUFFER_ALPHA,
    HTTP_ROUTE,
    INFERENCE_POOL,
    MODEL_ADAPTER,  # an operator may be newer than the cluster's CRDs
    MODEL_CACHE,
    REFERENCE_GRANT,
    MODEL_REWRITE,
)
"""Not every cluster has these kinds, nor has every operator leave to read them."""

NEWER = {CAPACITY_BUFFER_ALPHA: CAPACITY_BUFFER}
"""Of a kind that clusters serve in several versions: where the newer one is served, the older one is left alone."""


def _rule(group: str, *resources: str, verbs: tuple[str, ...]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


_WATCH = ("list", "watch")
_APPLY = ("get", *_WATCH, "create", "patch")

NAMESPACED_RULES: tuple[dict[str, Any], ...] = (
    _rule(labels.GROUP, "modelserves", verbs=("get", *_WATCH)),
    _rule(labels.GROUP, "modelserves/status", verbs=("patch",)),
    _rule(labels.GROUP, "modelserves/finalizers", verbs=("update",)),
    _rule(labels.GROUP, "modeladapters", verbs=("get", *_WATCH, "patch")),
    _rule(labels.GROUP, "modeladapters/status", verbs=("patch",)),
    _rule(REFERENCE_GRANT.group, REFERENCE_GRANT.plural, verbs=_WATCH),
    _rule("apps", "deployments", "controllerrevisions", verbs=(*_APPLY, "delete")),
    _rule("batch", "jobs", verbs=(*_APPLY, "delete")),
    _rule("", "configmaps", verbs=(*_APPLY, "delete")),
    _rule("", "services", verbs=(*_APPLY, "delete")),
    _rule("policy", "poddisruptionbudgets", verbs=(*_APPLY, "delete")),
    _rule("", "podtemplates", verbs=(*_APPLY, "delete")),
    _rule(CAPACITY_BUFFER.group, CAPACITY_BUFFER.plural, verbs=(*_APPLY, "delete")),
    _rule(CLAIM_TEMPLATE.group, CLAIM_TEMPLATE.plural, verbs=(*_APPLY, "delete")),
    _rule(RESOURCE_CLAIM.group, RESOURCE_CLAIM.plural, verbs=("get",)),
    _rule(HTTP_ROUTE.group, HTTP_ROUTE.plural, verbs=(*_APPLY, "delete")),
    _rule(INFERENCE_POOL.group, INFERENCE_POOL.plural, verbs=(*_APPLY, "delete")),
    _rule(MODEL_REWRITE.group, MODEL_REWRITE.plural, verbs=(*_APPLY, "delete")),
    _rule("", "pods", verbs=("get", *_WATCH, "patch")),
    _rule(ENDPOINT_SLICE.group, ENDPOINT_SLICE.plural, verbs=_WATCH),
    _rule("", "persistentvolumeclaims", verbs=("get",)),
    _rule("", "events", verbs=("list", "create")),
)
"""RBAC rules in the watched namespaces."""

API_PROXY_RULES: tuple[dict[str, Any], ...] = (_rule("", "pods/proxy", verbs=("get", "update")),)
"""The same, with worker access api-proxy."""

ADAPTER_SECRET_RULES: tuple[dict[str, Any], ...] = (_rule("", "secrets", verbs=("get",)),)
"""The same, where ModelAdapters may name Secrets."""

CACHE_RULES: tuple[dict[str, Any], ...] = (
    _rule(labels.GROUP, MODEL_CACHE.plural, verbs=("get", *_WATCH, "patch")),
    _rule(labels.GROUP, f"{MODEL_CACHE.plural}/status", verbs=("patch",)),
    _rule(labels.GROUP, f"{MODEL_CACHE.plural}/finalizers", verbs=("update",)),
    _rule("", CLAIM.plural, verbs=("create", "patch", "delete")),
)
"""The same, where ModelCaches are kept."""

OWN_RULES: tuple[dict[str, Any], ...] = (
    _rule("", "configmaps", verbs=("get", "create", "patch")),
    _rule("coordination.k8s.io", "leases", verbs=("get", "create", "update")),
    _rule("", "secrets", verbs=("get", "patch")),
    _rule("", "events", verbs=("create",)),
)
"""RBAC rules in the operator's own namespace: what was learned about memory, the user's accelerators, the election, the
key by which workers know it, and Events about what administrators should know.
"""

CLUSTER_RULES: tuple[dict[str, Any], ...] = (
    _rule("", "nodes", verbs=_WATCH),
    _rule(NODE_POOL.group, NODE_POOL.plural, verbs=_WATCH),
    _rule(RESOURCE_SLICE.group, RESOURCE_SLICE.plural, verbs=_WATCH),
)
"""RBAC rules that only a ClusterRole can give.

Without the rule for NodePools, pools that have no node yet are unknown; without that for ResourceSlices, GPUs that only
those tell of. Nothing else is lost.
"""

WEBHOOK_RULES: tuple[dict[str, Any], ...] = (
    _rule("apps", "controllerrevisions", verbs=("list",)),
    _rule("", "configmaps", "persistentvolumeclaims", verbs=("get",)),
    _rule(labels.GROUP, MODEL_CACHE.plural, verbs=("get",)),
)
"""RBAC rules of the webhook in watched namespaces: revisions that run, facts of models. CLUSTER_RULES come beside."""

WEBHOOK_TRUST_RULES: tuple[dict[str, Any], ...] = (
    _rule("", "secrets", verbs=("get", "patch")),
    _rule(WEBHOOK_CONFIGURATION.group, WEBHOOK_CONFIGURATION.plural, verbs=("get", "patch")),
)
"""RBAC rules of the webhook over its own certificate and its own configuration, each by name."""

ADMISSION_VERBS: tuple[tuple[str, str, str], ...] = (
    # Server-side apply asks for it when the object is new; the request itself is a patch.
    ("apps", "deployments", "create"),
    ("apps", "controllerrevisions", "create"),
    ("batch", "jobs", "create"),
    ("", "configmaps", "create"),
    ("", "services", "create"),
    ("policy", "poddisruptionbudgets", "create"),
    ("", "podtemplates", "create"),
    (CAPACITY_BUFFER.group, CAPACITY_BUFFER.plural, "create"),
    (CLAIM_TEMPLATE.group, CLAIM_TEMPLATE.plural, "create"),
    (HTTP_ROUTE.group, HTTP_ROUTE.plural, "create"),
    (INFERENCE_POOL.group, INFERENCE_POOL.plural, "create"),
    (MODEL_REWRITE.group, MODEL_REWRITE.plural, "create"),
    ("", CLAIM.plural, "create"),
    # An owner reference is only admitted to those who may delete the object: children that an orphaning delete left.
    ("", "services", "delete"),
    ("policy", "poddisruptionbudgets", "delete"),
    # blockOwnerDeletion is only admitted to those who may update the owner's finalizers; none is ever set.
    (labels.GROUP, "modelserves/finalizers", "update"),
    (labels.GROUP, "modelcaches/finalizers", "update"),
)
"""(group, resource, verb) that admission asks for while it judges another request: no request of ours names them."""
