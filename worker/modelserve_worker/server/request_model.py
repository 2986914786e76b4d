"""What all request bodies and their parts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from modelserve_worker.server.field_policy import LENIENT, FieldPolicy, Ignored


class RequestModel(BaseModel):
    """Exact types (no "5" for 5), no NaN, no unknown fields but those of `ignored`; null means that one was left out.

    The context of a validation may be the FieldPolicy to follow. `described_as` stands before the names of its fields
    where ignored ones are counted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    ignored: ClassVar[Mapping[str, Ignored]] = {}
    described_as: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        policy = info.context if isinstance(info.context, FieldPolicy) else LENIENT
        return policy.without_ignored(body, cls.ignored, cls.described_as)
