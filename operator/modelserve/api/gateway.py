"""`spec.gateway` of a ModelServe: the route of a Gateway that leads to its workers, and who picks one of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from modelserve.api.schema_types import ApiModel, DnsName

Port = Annotated[int, Field(ge=1, le=65535, json_schema_extra={"format": "int32"})]
_HOST_NAME_PATTERN = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
HostName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_HOST_NAME_PATTERN)]


class GatewayReference(ApiModel):
    """A Gateway (gateway.networking.k8s.io), or one of its listeners."""

    name: DnsName = Field(description="Name of the Gateway.")
    namespace: DnsName | None = Field(
        default=None, description="Its namespace, whose routes it must allow; left out: that of the ModelServe."
    )
    section_name: DnsName | None = Field(default=None, description="One listener; left out: all that fit.")


class EndpointPicker(ApiModel):
    """The Service of an endpoint picker, which chooses a worker for each request."""

    name: DnsName = Field(description="Name of its Service, in the namespace of the ModelServe.")
    port: Port = Field(description="Port of the Service.")
    failure_mode: Literal["FailOpen", "FailClose"] | None = Field(
        default=None,
        description="Whether requests reach some worker while the picker does not answer; left out: FailClose, they "
        "are refused.",
    )


class GatewaySpec(ApiModel):
    """An HTTPRoute of the ModelServe's name; with an endpoint picker it leads to an InferencePool of that name."""

    parent_refs: tuple[GatewayReference, ...] = Field(
        min_length=1, max_length=8, description="Gateways that the route attaches to."
    )
    hostnames: tuple[HostName, ...] = Field(
        default=(), max_length=16, description="Host names of the route; left out: those of the listeners."
    )
    endpoint_picker: EndpointPicker | None = Field(
        default=None, description="Who picks a worker; left out: the route leads to the Service."
    )
