"""Settings of the operator: MODELSERVE_* environment variables, read once, frozen, logged at start-up."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from modelserve import __version__
from modelserve.api.schema_types import LabelKey, LabelValue
from modelserve.api.spec import WorkerPolicy
from modelserve.errors import InvalidInput
from modelserve.hardware import IMAGE_ARCHITECTURES
from modelserve_operator.allowed import ANY, AllowRule
from modelserve_operator.inventory.pools import PassingTaints

PREFIX = "MODELSERVE_"
DEFAULT_NAMESPACE = "modelserve-system"

TaintKey = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=r"^[A-Za-z0-9._/-]+$")]
Architecture = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,16}$")]


class WorkerAccess(StrEnum):
    """How the operator reads /v1/plan of a worker."""

    POD_IP = "pod-ip"  # the operator runs where pod addresses are routable: in the cluster
    API_PROXY = "api-proxy"  # outside the cluster: through the API server's pod proxy (needs pods/proxy)


class ServiceType(StrEnum):
    """Type of the Services that clients of a ModelServe use."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class Settings(BaseModel):
    """Each field is the variable MODELSERVE_<FIELD IN CAPITALS>; other MODELSERVE_* variables are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = Field(
        default=f"modelserve-worker:{__version__}", min_length=1, description="Image of the pods."
    )
    worker_architectures: tuple[Architecture, ...] = Field(
        default=IMAGE_ARCHITECTURES,
        min_length=1,
        max_length=8,
        description="Comma-separated CPUs that the pods' images are built for, as kubernetes.io/arch names them.",
    )
    image_pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    image_pull_secrets: tuple[str, ...] = Field(
        default=(),
        max_length=8,
        description="Comma-separated Secrets of the ModelServe's namespace, for pulling the pods' images.",
    )
    pod_user_id: int | None = Field(
        default=65532,
        ge=1,
        le=(1 << 31) - 1,
        description="User and group of the pods; empty: the platform assigns them, as OpenShift does by namespace.",
    )
    child_labels: dict[LabelKey, LabelValue] = Field(
        default={}, max_length=32, description="JSON object: labels of every child, beside the operator's own."
    )
    child_annotations: dict[LabelKey, str] = Field(
        default={}, max_length=32, description="JSON object: annotations of every child, beside the operator's own."
    )
    service_type: ServiceType = ServiceType.CLUSTER_IP
    watch_namespaces: tuple[str, ...] = Field(default=(), description="Comma-separated; empty: all namespaces.")
    namespace: str = Field(
        default=DEFAULT_NAMESPACE,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="The operator's own: its ConfigMaps are read and written there.",
    )
    lease_name: str = Field(
        default="",
        max_length=63,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$",
        description="Lease in the operator's namespace; of several operators its holder works. Empty: no election.",
    )
    lease_holder: str = Field(
        default_factory=socket.gethostname, min_length=1, description="This operator's name in it."
    )
    management_secret: str = Field(
        default="modelserve-management",
        min_length=1,
        max_length=253,
        description="Secret of the operator's namespace from which the keys come by which workers know it.",
    )
    learn_for_all: tuple[str, ...] = Field(
        default=(),
        description="Comma-separated namespaces, or *: what their workers measured counts in every namespace.",
    )
    allowed: tuple[AllowRule, ...] = Field(
        default=(AllowRule(namespaces=ANY),),
        min_length=1,
        max_length=256,
        description="JSON list: what ModelServes of which namespaces may ask for; the first that names one counts.",
    )
    startup_taints: tuple[TaintKey, ...] = Field(
        default=(), max_length=64, description="Comma-separated keys of taints that nodes have while they start."
    )
    leaving_taints: tuple[TaintKey, ...] = Field(
        default=(), max_length=64, description="Comma-separated keys of taints of nodes whose pods will have to go."
    )
    worker_access: WorkerAccess = WorkerAccess.POD_IP
    model_caches: bool = Field(default=False, description="Whether ModelCaches are kept; needs leave to write claims.")
    cache_fetches: int = Field(default=4, ge=1, le=256, description="Most ModelCaches that are fetched at a time.")
    metrics_port: int = Field(default=9090, ge=0, le=65535, description="/metrics and /healthz; 0: any free port.")
    metrics_host: str = "0.0.0.0"  # noqa: S104 - a pod's probes and Prometheus come from outside it
    resync_seconds: float = Field(default=600.0, ge=30.0, description="Full relist and reconcile of everything.")
    watchdog_seconds: float = Field(default=600.0, ge=5.0, description="Between two checks for watches that died.")
    reconcile_workers: int = Field(default=16, ge=1, le=256)
    worker_policy: WorkerPolicy = Field(
        default="Proposed", description="When another worker image takes over, where a ModelServe leaves it open."
    )
    rolling_budget: int = Field(default=1, ge=1, le=1000, description="ModelServes that move to it at a time.")
    rolling_failures: int = Field(
        default=2, ge=1, le=1000, description="Namespaces in which it fails until no more move; one that fails waits."
    )
    rolling_patience_seconds: float = Field(
        default=600.0, ge=1.0, description="How long a ModelServe that moves and has no room keeps others waiting."
    )
    build_id: str = Field(default="", max_length=128, description="Build of this operator, kept in revisions it makes.")
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @property
    def passing(self) -> PassingTaints:
        """Taints that say nothing of a pool."""
        return PassingTaints(self.startup_taints, self.leaving_taints)


class WebhookSettings(Settings):
    """Those of the webhook. It plans with the operator's own, so it is given the same."""

    webhook_host: str = "0.0.0.0"  # noqa: S104 - the API server comes from outside the pod
    webhook_port: int = Field(default=10250, ge=0, le=65535, description="HTTPS for the API server; 0: any free port.")
    webhook_hosts: tuple[str, ...] = Field(
        min_length=1, max_length=16, description="Comma-separated names and addresses that the API server asks."
    )
    webhook_secret: str = Field(
        min_length=1, max_length=253, description="Secret of the operator's namespace that keeps the certificate."
    )
    webhook_configuration: str = Field(
        min_length=1, max_length=253, description="ValidatingWebhookConfiguration that is to trust it."
    )


_LISTS = frozenset(
    {
        "worker_architectures", "watch_namespaces", "image_pull_secrets", "learn_for_all", "webhook_hosts",
        "startup_taints", "leaving_taints",
    }
)  # fmt: skip
_OBJECTS = frozenset({"child_labels", "child_annotations", "allowed"})

AnySettings = TypeVar("AnySettings", bound=Settings)


def _parsed(field: str, text: str) -> Any:
    if field == "pod_user_id" and not text:
        return None
    if field in _LISTS:
        return tuple(filter(None, map(str.strip, text.split(","))))
    if field in _OBJECTS:
        try:
            return json.loads(text)
        except ValueError:
            return text  # the validation names the variable and what it holds
    return text


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The operator's settings. Raises InvalidInput as `read`."""
    return read(Settings, environment)


def read(kind: type[AnySettings], environment: Mapping[str, str]) -> AnySettings:
    """Read and check every MODELSERVE_* variable. Raises InvalidInput that names variable, value and limit."""
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in kind.model_fields:
            known = ", ".join(f"{PREFIX}{name.upper()}" for name in kind.model_fields)
            raise InvalidInput(f"unknown setting {variable}={text!r}; known settings: {known}", field=variable)
        values[field] = _parsed(field, text)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        variable = f"{PREFIX}{str(first['loc'][0]).upper()}"
        raise InvalidInput(f"{variable}={first['input']!r}: {first['msg']}", field=variable) from error
