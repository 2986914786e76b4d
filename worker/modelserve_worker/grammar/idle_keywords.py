"""Keywords of a JSON schema that ask for nothing with the values that generators of schemas give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IDLE: Mapping[str, Any] = {"uniqueItems": False, "minProperties": 0}
# Where a schema holds schemas; under other keywords stands data, in which the same names mean nothing.
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_idle_keywords(schema: Any) -> Any:
    """The schema less such keywords, wherever they stand in it."""
    if not isinstance(schema, dict):
        return schema
    return {name: _inner(name, value) for name, value in schema.items() if not _is_idle(name, value)}


def _is_idle(name: str, value: Any) -> bool:
    return name in _IDLE and type(value) is type(_IDLE[name]) and value == _IDLE[name]


def _inner(name: str, value: Any) -> Any:
    if name in _MAPPINGS and isinstance(value, dict):
        return {key: without_idle_keywords(each) for key, each in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [without_idle_keywords(each) for each in value]
    return without_idle_keywords(value) if name in _SCHEMAS else value
