"""JSON as clients send it (what RFC 8259 allows, and nothing that Python reads beside it) and as they get it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps would build one per call


def to_json(document: Any) -> bytes:
    """Compact, in UTF-8. The document's text must be valid Unicode."""
    return _encode(document).encode()


def read_json(text: str | bytes) -> Any:
    """The document. Raises ValueError for NaN, infinities and numbers that a float cannot hold, too."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def nested_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` objects and lists stand inside each other, `value` counted."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value
