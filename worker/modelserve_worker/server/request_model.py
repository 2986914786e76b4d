"""What all request bodies and their parts share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class RequestModel(BaseModel):
    """Exact types (no "5" for 5, but 5.0, which JSON does not tell from it), no unknown fields, no NaN.

    null means that a field was left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: _whole(value) for name, value in body.items() if value is not None}


def whole_numbers(values: Any) -> Any:
    """A list of numbers with 5 for 5.0; anything else as it is."""
    if not isinstance(values, list) or float not in set(map(type, values)):
        return values
    return [_whole(value) for value in values]


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value
