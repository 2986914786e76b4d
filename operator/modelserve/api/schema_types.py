"""Field types of the resource: every string, number, list and map carries its bounds, which the CRD copies."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationInfo

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$"
LABEL_KEY_PATTERN = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
SUBDOMAIN_PATTERN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
MAX_BYTES = 1 << 53
# Of a ModelServe: a Service name is a DNS label of 63; children are NAME-HASH, pods add 17 more, Jobs a suffix.
MAX_NAME_LENGTH = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def camel(name: str) -> str:
    """`max_model_len` -> `maxModelLen`; digits stay as they are (`at8k_bytes` -> `at8kBytes`)."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


class ApiModel(BaseModel):
    """Base of every object of the resource: camelCase outside, snake_case inside, frozen, unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=camel, validate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """The JSON form as Kubernetes keeps it: camelCase names, fields that are None left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def cel_rules(*rules: tuple[str, str]) -> ConfigDict:
    """CEL rules (expression, message) that the CRD carries beside the model; a model_validator states the same."""
    checks = [{"rule": rule, "message": message} for rule, message in rules]
    schema: dict[str, Any] = {"x-kubernetes-validations": checks}
    return ConfigDict(json_schema_extra=schema)


ASKED = "asked"  # of a validation's context: the object is yet to be admitted


def is_asked(info: ValidationInfo) -> bool:
    """Whether a rule that later releases added is to be kept: one that is stored already was admitted without it, and
    the API server lets it be edited as long as what breaks the rule stays as it is."""
    return bool((info.context or {}).get(ASKED))


def _quantity_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


PathSegments = Annotated[
    str, StringConstraints(max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$")
]
DnsName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=SUBDOMAIN_PATTERN)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE_PATTERN)]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
Product = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=LABEL_VALUE_PATTERN)]
Quantity = Annotated[
    str,
    StringConstraints(min_length=1, max_length=32, pattern=QUANTITY_PATTERN),
    BeforeValidator(_quantity_text),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES, json_schema_extra={"format": "int64"})]
Tokens = Annotated[int, Field(ge=1, le=1 << 24, json_schema_extra={"format": "int32"})]
Count = Annotated[int, Field(ge=0, le=1 << 20, json_schema_extra={"format": "int32"})]
GpuCount = Annotated[int, Field(ge=0, le=64, json_schema_extra={"format": "int32"})]
Generation = Annotated[int, Field(ge=0, le=MAX_BYTES, json_schema_extra={"format": "int64"})]
DecimalString = Annotated[str, StringConstraints(max_length=20, pattern=r"^(0|[1-9][0-9]*)(\.[0-9]{1,4})?$")]
Share = Annotated[str, StringConstraints(max_length=6, pattern=r"^(0(\.[0-9]{1,4})?|1(\.0{1,4})?)$")]
Price = Annotated[str, StringConstraints(max_length=10, pattern=r"^(0|[1-9][0-9]*)(\.[0-9]{1,4})?$")]
SignedDecimalString = Annotated[str, StringConstraints(max_length=20, pattern=r"^-?(0|[1-9][0-9]*)(\.[0-9]{1,4})?$")]
Message = Annotated[str, StringConstraints(max_length=4096)]

Timestamp = Annotated[str, StringConstraints(max_length=32), Field(json_schema_extra={"format": "date-time"})]


class Condition(ApiModel):
    """A condition in the form of metav1.Condition."""

    type: str = Field(min_length=1, max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Kind of condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: Generation | None = Field(
        default=None, description="metadata.generation that this condition was computed from."
    )
    last_transition_time: Timestamp = Field(description="When status last changed.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="CamelCase reason.",
    )
    message: str = Field(max_length=32768, description="What happened, in a sentence for people.")


BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}  # conditions
UNOBSERVED = Condition(
    type="Ready",
    status="Unknown",
    reason="Pending",
    message="Waiting for the operator.",
    last_transition_time="1970-01-01T00:00:00Z",
)


_FACTORS = {
    "": Decimal(1), "m": Decimal("0.001"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def quantity_of(value: object) -> Decimal | None:
    """The number of what may be a Kubernetes quantity, None where it is none."""
    text = str(value)
    return quantity_value(text) if re.fullmatch(QUANTITY_PATTERN, text) else None


def quantity_value(quantity: str) -> Decimal:
    """The number a Kubernetes quantity stands for (`3Gi` -> 3221225472). The text must match QUANTITY_PATTERN."""
    digits = quantity.rstrip("kKMGTPEim")
    return Decimal(digits) * _FACTORS[quantity[len(digits) :]]
