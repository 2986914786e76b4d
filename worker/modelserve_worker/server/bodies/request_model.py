"""What all request bodies and their parts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, model_validator

from modelserve_worker.server.bodies.field_policy import Ignored, policy_of


class RequestModel(BaseModel):
    """Exact types (no "5" for 5, but 5.0, which JSON does not tell from it), no NaN, no unknown fields.

    A field of `ignored` is let pass with the values that it is listed with, and dropped; null means that one was left
    out. The context of a validation may be the FieldPolicy to follow. `described_as` stands before the names of its
    fields where ignored ones are counted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    ignored: ClassVar[Mapping[str, Ignored]] = {}
    described_as: ClassVar[str] = ""

    _session: str = PrivateAttr("")

    @property
    def session(self) -> str:
        """What tells its conversation from others, where its client says that: an ignored field, mostly."""
        return self._session

    def remember_session(self, document: Mapping[str, Any]) -> None:
        """Of the whole body, as it came."""
        metadata = document.get("metadata")
        of_user = metadata.get("user_id") if isinstance(metadata, dict) else None
        named = (document.get("prompt_cache_key"), document.get("user"), of_user)
        self._session = next((each for each in named if isinstance(each, str) and each), "")

    @property
    def is_encoded(self) -> bool:
        """Whether nothing is left to encode, decode or compile before the engine has its only prompt."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _fields_that_count(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        kept = policy_of(info.context).without_ignored(body, cls.ignored, cls.described_as)
        return {name: _whole(value) for name, value in kept.items()}


def whole_numbers(values: Any) -> Any:
    """A list of numbers with 5 for 5.0; anything else as it is."""
    if not isinstance(values, list) or float not in set(map(type, values)):
        return values
    return [_whole(value) for value in values]


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value
