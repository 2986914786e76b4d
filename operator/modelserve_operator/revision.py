"""A revision: a committed plan with everything its pods are made of. Its ConfigMap is its only memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve_operator import labels

Body = Mapping[str, Any]

ENGINE_FILE = "engine.yaml"
_PLAN_FILE = "plan.json"
_TEMPLATE_FILE = "template.json"
_FACTS_FILE = "revision.json"


def spec_hash(spec: ModelServeSpec) -> str:
    """Digest of all that shapes a plan or its pods: the spec without replicas, plan mode and surge rules."""
    document = spec.to_json()
    document.pop("replicas", None)
    document.pop("plan", None)
    document["rollout"] = {"drainSeconds": spec.rollout.drain_seconds}
    return labels.short_hash(document)


@dataclass(frozen=True)
class Revision:
    """`hash` covers plan, image, placement and the pod-relevant spec; `plan.hash` is the planner's.

    `template` is a PodTemplateSpec; `committed_at` (RFC 3339, seconds) orders revisions of the same spec.
    """

    hash: str
    spec_hash: str
    plan: PlanStatus
    engine_yaml: str
    template: Mapping[str, Any]
    weight_bytes: int
    committed_at: str = ""
    recommitted: bool = False  # committed_at is later than its ConfigMap

    @property
    def served_name(self) -> str:
        """Name of the model in the API."""
        return str(yaml.safe_load(self.engine_yaml).get("servedModelName"))

    @property
    def model(self) -> tuple[str, str]:
        """What is served: the directory in the pod, and the volume it lies on, unless it was downloaded there."""
        pod = self.template.get("spec") or {}
        volumes = [volume for volume in pod.get("volumes") or () if volume.get("name") == "weights"]
        where = "" if pod.get("initContainers") else _json(volumes)
        return str(yaml.safe_load(self.engine_yaml).get("model")), where

    def to_data(self) -> dict[str, str]:
        """`data` of the ConfigMap."""
        return {
            ENGINE_FILE: self.engine_yaml,
            _PLAN_FILE: _json(self.plan.to_json()),
            _TEMPLATE_FILE: _json(self.template),
            _FACTS_FILE: _json({"weightBytes": self.weight_bytes}),
        }

    @classmethod
    def from_config_map(cls, body: Body) -> Revision | None:
        """Read back `to_data`; None for other ConfigMaps, and for one that this release cannot read."""
        plan_hash = labels.label_of(body, labels.PLAN_HASH)
        data = body.get("data") or {}
        if labels.label_of(body, labels.COMPONENT) != labels.REVISION or plan_hash is None:
            return None
        try:
            return cls(
                hash=plan_hash,
                spec_hash=labels.label_of(body, labels.SPEC_HASH) or "",
                plan=PlanStatus.model_validate_json(data[_PLAN_FILE]),
                engine_yaml=data[ENGINE_FILE],
                template=json.loads(data[_TEMPLATE_FILE]),
                weight_bytes=int(json.loads(data[_FACTS_FILE])["weightBytes"]),
                committed_at=labels.annotation_of(body, labels.COMMITTED_AT)
                or body["metadata"].get("creationTimestamp")
                or "",
                recommitted=labels.annotation_of(body, labels.COMMITTED_AT) is not None,
            )
        except (KeyError, ValueError, TypeError, ValidationError):
            return None


def _json(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))
