"""Settings of the operator: MODELSERVE_* environment variables, read once, frozen, logged at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelserve import __version__
from modelserve.errors import InvalidInput

PREFIX = "MODELSERVE_"
DEFAULT_NAMESPACE = "modelserve-system"


class WorkerAccess(StrEnum):
    """How the operator reads /v1/plan of a worker."""

    POD_IP = "pod-ip"  # the operator runs where pod addresses are routable: in the cluster
    API_PROXY = "api-proxy"  # outside the cluster: through the API server's pod proxy (needs pods/proxy)


class Settings(BaseModel):
    """Each field is the variable MODELSERVE_<FIELD IN CAPITALS>; other MODELSERVE_* variables are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = Field(
        default=f"modelserve-worker:{__version__}", min_length=1, description="Image of the pods."
    )
    image_pull_policy: str = Field(default="IfNotPresent", pattern="^(Always|IfNotPresent|Never)$")
    watch_namespaces: tuple[str, ...] = Field(default=(), description="Comma-separated; empty: all namespaces.")
    namespace: str = Field(
        default=DEFAULT_NAMESPACE,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        description="The operator's own: its ConfigMaps are read and written there.",
    )
    worker_access: WorkerAccess = WorkerAccess.POD_IP
    metrics_port: int = Field(default=9090, ge=0, le=65535, description="/metrics and /healthz; 0: any free port.")
    metrics_host: str = "0.0.0.0"  # noqa: S104 - a pod's probes and Prometheus come from outside it
    resync_seconds: float = Field(default=600.0, ge=30.0, description="Full relist and reconcile of everything.")
    watchdog_seconds: float = Field(default=60.0, ge=5.0, description="Between two checks for frozen watches.")
    reconcile_workers: int = Field(default=8, ge=1, le=256)
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read and check every MODELSERVE_* variable. Raises InvalidInput that names variable, value and limit."""
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in Settings.model_fields:
            known = ", ".join(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)
            raise InvalidInput(f"unknown setting {variable}={text!r}; known settings: {known}", field=variable)
        values[field] = tuple(filter(None, text.split(","))) if field == "watch_namespaces" else text
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        variable = f"{PREFIX}{str(first['loc'][0]).upper()}"
        raise InvalidInput(f"{variable}={first['input']!r}: {first['msg']}", field=variable) from error
