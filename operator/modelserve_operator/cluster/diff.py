"""Compares a live object with what we would apply. Pure; decides between a write and no write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any

from modelserve.api.schema_types import quantity_value
from modelserve_operator import labels

_QUANTITY_FIELDS = frozenset({"requests", "limits", "sizeLimit"})
_ITEM_KEYS = ("name", "uid", "key", "type", "conditionType")
_FINEST = Decimal("0.001")  # the API server rounds finer quantities up to this


def with_applied_hash(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with an annotation that digests it: a field that a later body drops then still shows as a difference."""
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), labels.APPLIED_HASH: labels.short_hash(body)}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def covers(live: Any, desired: Any, *, quantity: bool = False) -> bool:
    """True when every field of `desired` has the same value in `live`; fields of `live` that we do not set are ignored.

    Lists of objects with a name (or uid, key, type) of their own are matched by it, other lists item by item.
    Quantities are compared as numbers, because the API server rewrites `0.5` as `500m`. It also drops fields of objects
    that are empty text.
    """
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            covers(live[key], value, quantity=quantity or key in _QUANTITY_FIELDS) if key in live else value == ""
            for key, value in desired.items()
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        return _covers_list(live, desired, quantity=quantity)
    if quantity and isinstance(desired, str) and isinstance(live, str):
        return _number(live) == _number(desired)
    return bool(live == desired)


def uncovered(live: Mapping[str, Any], desired: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Where `covers` fails: what `live` has there (None: nothing), by the path of the field; lists as a whole."""
    found: dict[str, Any] = {}
    for key, value in desired.items():
        here, have = f"{path}.{key}" if path else key, live.get(key)
        if isinstance(value, Mapping) and isinstance(have, Mapping) and key not in _QUANTITY_FIELDS:
            found.update(uncovered(have, value, path=here))
        elif not covers(live, {key: value}):
            found[here] = have
    return found


def _covers_list(live: Sequence[Any], desired: Sequence[Any], *, quantity: bool) -> bool:
    for item_key in _ITEM_KEYS:
        if desired and all(isinstance(item, Mapping) and item_key in item for item in (*live, *desired)):
            found = {item[item_key]: item for item in live}
            if len(found) < len(live):  # such as two tolerations of one taint key
                continue
            return all(covers(found.get(item[item_key]), item, quantity=quantity) for item in desired)
    return len(live) == len(desired) and all(
        covers(one, other, quantity=quantity) for one, other in zip(live, desired, strict=True)
    )


def _number(text: str) -> Decimal | str:
    try:
        return quantity_value(text).quantize(_FINEST, rounding=ROUND_CEILING)
    except (ArithmeticError, KeyError):
        return text
