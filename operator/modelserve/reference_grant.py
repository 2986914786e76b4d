"""What a ReferenceGrant (gateway.networking.k8s.io) says of ModelAdapters of another namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserve.api.model_adapter import ADAPTER_KIND
from modelserve.api.modelserve import GROUP, KIND


def grants(body: Mapping[str, Any], namespace: str, name: str) -> bool:
    """Whether a ReferenceGrant lets ModelAdapters of `namespace` refer to the ModelServe `name` beside it."""
    spec = body.get("spec") or {}
    source = {"group": GROUP, "kind": ADAPTER_KIND, "namespace": namespace}
    to = {"group": GROUP, "kind": KIND}
    return any(_says(each, source) for each in spec.get("from") or ()) and any(
        _says(each, to) and each.get("name") in (None, "", name) for each in spec.get("to") or ()
    )


def _says(entry: Mapping[str, object], wanted: Mapping[str, str]) -> bool:
    return all(entry.get(key) == value for key, value in wanted.items())
