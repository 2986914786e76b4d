"""`spec.capacityBuffer` of a ModelServe: room for more workers that an autoscaler is asked to keep ready."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from modelserve.api.schema_types import ApiModel, Count, LabelKey, Quantity, cel_rules

_NO_SIZE = "capacityBuffer needs replicas or limits"


class CapacityBufferSpec(ApiModel):
    """A CapacityBuffer (autoscaling.x-k8s.io) of the planned shape: nodes stay warm for workers that are to come."""

    model_config = cel_rules(("has(self.replicas) || (has(self.limits) && size(self.limits) > 0)", _NO_SIZE))

    replicas: Count | None = Field(
        default=None, description="Workers that there should be room for, beside those that run."
    )
    limits: dict[LabelKey, Quantity] = Field(
        default_factory=dict,
        max_length=16,
        description="Most that all of them may request together, by resource name; with limits alone, as many as fit "
        "and the installation allows.",
    )
    provisioning_strategy: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9./-]*$",
        description="How the room is kept, in the autoscaler's words; left out: buffer.x-k8s.io/active-capacity, nodes "
        "that run.",
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.replicas is None and not self.limits:
            raise ValueError(_NO_SIZE)
        return self
