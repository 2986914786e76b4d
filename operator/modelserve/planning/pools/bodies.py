"""Parts of Kubernetes objects, which come from files as well and may hold anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mapping(value: object) -> Mapping[str, Any]:
    """A part that should be an object; empty where it is none."""
    return value if isinstance(value, Mapping) else {}
