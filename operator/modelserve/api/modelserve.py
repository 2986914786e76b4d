"""The ModelServe object itself: names of the kind, and parsing with messages for people."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from modelserve.api.schema_types import ASKED, MAX_NAME_LENGTH, NAME_PATTERN, ApiModel, Generation, camel
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import ModelServeStatus
from modelserve.api.unknown_fields import without_unknown
from modelserve.errors import InvalidInput

GROUP = "serving.modelserve.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ModelServe"
PLURAL = "modelserves"
SINGULAR = "modelserve"
SHORT_NAMES = ("ms",)
CATEGORIES = ("serving",)

NAME_MESSAGE = (
    f"metadata.name must be at most {MAX_NAME_LENGTH} characters, start with a letter and hold only "
    "lower-case letters, digits and '-': it names a Service"
)


class ObjectMeta(BaseModel):
    """The part of metadata that is read; everything else of metadata is Kubernetes' own."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=camel, validate_by_name=True)

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: Generation = 1
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None

    @field_validator("name")
    @classmethod
    def _service_name(cls, name: str) -> str:
        if len(name) > MAX_NAME_LENGTH or not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"{NAME_MESSAGE}; got {name!r}")
        return name


class ModelServe(ApiModel):
    """A Gemma 4 model served from this cluster."""

    api_version: Literal["serving.modelserve.dev/v1alpha1"]
    kind: Literal["ModelServe"]
    metadata: ObjectMeta
    spec: ModelServeSpec
    status: ModelServeStatus | None = None

    @classmethod
    def parse(cls, document: object, *, file_uri: bool = False, stored: bool = False) -> Self:
        """Validate one parsed document. `file_uri` also admits file://DIR model addresses (the command line); `stored`
        what an earlier release let in and this one lets nobody add.

        It is validated as the JSON that the API server would see, which takes no text for a number or a truth value.
        Raises InvalidInput that names the first wrong field, the value and the limit.
        """
        if not isinstance(document, dict):
            raise InvalidInput(f"a ModelServe must be an object, not {type(document).__name__}")
        try:
            text = json.dumps(document, default=str)
            return cls.model_validate_json(
                text, strict=True, context={"file_uri": file_uri, ASKED: not stored}, by_alias=True, by_name=False
            )
        except ValidationError as error:
            raise _invalid(error) from error
        except (TypeError, ValueError, RecursionError) as error:  # a YAML file may hold more, such as circles
            raise InvalidInput(f"a ModelServe must be what JSON can say: {error}") from error

    @classmethod
    def parse_of_any_release(cls, document: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """Validate an object of the cluster, whose schema may be a later release's: fields of the spec that this
        release does not have are left out, and returned as paths such as spec.pod.later. The status is not read.

        Raises InvalidInput.
        """
        kept = {key: value for key, value in document.items() if key != "status"}
        spec = kept.get("spec")
        unknown: tuple[str, ...] = ()
        if isinstance(spec, Mapping):
            kept["spec"], unknown = without_unknown(ModelServeSpec, spec)
        return cls.parse(kept, stored=True), tuple(f"spec.{path}" for path in unknown)


def _invalid(error: ValidationError) -> InvalidInput:
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    text = f"{first['msg'].removeprefix('Value error, ')}{_given(first['input'])}"
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        text += f': quote it, "{json.dumps(first["input"])}"'
    return InvalidInput(f"{field}: {text}{more}", field=field)


def _given(value: Any) -> str:
    text = repr(value)
    return f"; got {text}" if isinstance(value, str | int | float) and len(text) <= 100 else ""
