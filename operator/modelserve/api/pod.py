"""What a user may add to the pods of a ModelServe. Fields that the operator sets itself win."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

from modelserve.api.schema_types import ApiModel, DnsName, LabelKey, LabelValue, Quantity, cel_rules, is_asked


class Toleration(ApiModel):
    """A Kubernetes toleration (core/v1)."""

    key: LabelKey | None = Field(default=None, description="Taint key; empty with operator Exists matches every taint.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How the value is compared.")
    value: LabelValue | None = Field(default=None, description="Taint value, for operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Taint effect; left out: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=1 << 31, description="Seconds a NoExecute taint is tolerated; left out: for ever."
    )


class LocalObjectReference(ApiModel):
    """A Secret of the same namespace."""

    name: DnsName = Field(description="Name of the Secret.")


class KeySelector(ApiModel):
    """One key of a Secret or ConfigMap of the same namespace."""

    name: DnsName = Field(description="Name of the object.")
    key: str = Field(min_length=1, max_length=253, pattern=r"^[-._A-Za-z0-9]+$", description="Key inside the object.")
    optional: bool | None = Field(default=None, description="True: the object or key may be missing.")


class EnvVarSource(ApiModel):
    """Where the value of a variable comes from; give exactly one."""

    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")


class EnvVar(ApiModel):
    """An environment variable of the worker container."""

    name: str = Field(
        min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", description="Name of the variable."
    )
    value: str | None = Field(default=None, max_length=8192, description="Its value, taken literally.")
    value_from: EnvVarSource | None = Field(default=None, description="Where the value is read from instead.")


_GPUS_ARE_THE_PLANS = "GPUs come from the plan: leave nvidia.com/ out, and say how many with parallelism.tensor"
_NO_GPUS = " && ".join(f"(!has(self.{side}) || !self.{side}.exists(name, name.startsWith('nvidia.com/')))"
                       for side in ("requests", "limits"))  # fmt: skip


class ResourceRequirements(ApiModel):
    """Requests and limits of the worker container, in Kubernetes quantities (`4`, `500m`, `24Gi`)."""

    model_config = cel_rules((_NO_GPUS, _GPUS_ARE_THE_PLANS))

    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Least the scheduler must set aside, by resource name."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict,
        max_length=16,
        description="Most the container may use, by resource name. On the CPU, `memory` is what the plan divides; "
        "left out: 4Gi, or the request where that is more.",
    )

    @model_validator(mode="after")
    def _without_gpus(self, info: ValidationInfo) -> Self:
        gpus = next((name for name in (*self.requests, *self.limits) if name.startswith("nvidia.com/")), None)
        if is_asked(info) and gpus is not None:
            raise ValueError(f"{_GPUS_ARE_THE_PLANS}; got {gpus}")
        return self


AnnotationValue = Annotated[str, StringConstraints(max_length=4096)]


_BY_NAME: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}  # each name once


class PodOverrides(ApiModel):
    """Additions to the worker pods."""

    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=32, description="Labels added to the pods."
    )
    annotations: dict[LabelKey, AnnotationValue] = Field(
        default_factory=dict, max_length=32, description="Annotations added to the pods."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=16, description="Taints the pods tolerate, besides that of GPU nodes."
    )
    priority_class_name: DnsName | None = Field(default=None, description="PriorityClass of the pods.")
    service_account_name: DnsName | None = Field(
        default=None, description="ServiceAccount of the pods; its token is not mounted."
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(), max_length=8, json_schema_extra=_BY_NAME, description="Secrets for pulling the image."
    )
    runtime_class_name: DnsName | None = Field(default=None, description="RuntimeClass of the pods.")
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=32,
        json_schema_extra=_BY_NAME,
        description="Environment variables added to the worker container.",
    )
    resources: ResourceRequirements | None = Field(
        default=None, description="CPU and memory of the worker container; GPUs come from the plan."
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        for field, names in (
            ("env", [variable.name for variable in self.env]),
            ("imagePullSecrets", [secret.name for secret in self.image_pull_secrets]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{field} names {twice} more than once; keep one of them")
        return self
