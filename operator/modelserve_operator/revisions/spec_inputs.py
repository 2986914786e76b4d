"""Hashes what of a spec a plan is made from, and apart from it what only its pods are, over a canonical form. Pure.

The canonical form leaves out what holds its default, so that a field which a later release adds with a default changes
no hash. How it is made is numbered: a revision keeps the number with its hashes, and is compared under that one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve.api import ModelServeSpec, PodOverrides
from modelserve.api.unknown_fields import without_unknown
from modelserve_operator import labels

ALGORITHM = 1

_PLANNED_POD_FIELDS = {"resources", "tolerations"}
_OF_PODS = ("model", "image", "api_key_secret_ref", "storage")
_OF_NEITHER = (
    "replicas",
    "plan",
    "rollout",  # but drainSeconds
    "revision_history_limit",
    "capacity_buffer",
    "gateway",
)
NOT_READ_BY_PLANNER: dict[str, Any] = {
    **dict.fromkeys((*_OF_PODS, *_OF_NEITHER), True),
    "pod": set(PodOverrides.model_fields) - _PLANNED_POD_FIELDS,
}
"""Fields that no plan depends on, but for its hash. A field that is added to the spec counts until it is named here."""


@dataclass(frozen=True)
class SpecInputs:
    """`plan`: what a plan is made from, `pod`: what its pods are made from beside it; hashes of one `algorithm`."""

    plan: str
    pod: str
    algorithm: int = ALGORITHM

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "plan": self.plan, "pod": self.pod}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SpecInputs:
        """Read `to_json`. Raises KeyError, and ValueError for an algorithm that this release does not have."""
        algorithm = int(document["algorithm"])
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"inputs.algorithm {algorithm} is not known to this release, whose newest is {ALGORITHM}")
        return cls(str(document["plan"]), str(document["pod"]), algorithm)

    def of(self, spec: ModelServeSpec) -> SpecInputs:
        """The inputs of `spec`, under the algorithm of these."""
        return spec_inputs(spec, algorithm=self.algorithm)


def spec_inputs(spec: ModelServeSpec, *, algorithm: int = ALGORITHM) -> SpecInputs:
    """Both hashes of a spec."""
    plan, pod = _ALGORITHMS[algorithm](spec)
    return SpecInputs(labels.short_hash(plan), labels.short_hash(pod), algorithm)


def canonical_spec(spec: ModelServeSpec) -> dict[str, Any]:
    """What a plan and its pods are made from, in canonical form: a spec again, without defaults."""
    kept = _canonical(spec, exclude=dict.fromkeys(_OF_NEITHER, True))
    drain = _canonical(spec, include={"rollout"}).get("rollout", {}).get("drainSeconds")
    return kept if drain is None else {**kept, "rollout": {"drainSeconds": drain}}


def inputs_of_any_release(document: Mapping[str, Any]) -> tuple[SpecInputs, dict[str, Any]]:
    """Inputs as a revision keeps them, with the spec that they are of. Raises KeyError and ValueError.

    A later release may have read fields that this one does not have: then the hashes are those of the rest, so that a
    spec from which this release leaves out the same fields is the same.
    """
    inputs = SpecInputs.from_json(document)
    spec, unknown = without_unknown(ModelServeSpec, document["spec"])
    return (inputs.of(ModelServeSpec.model_validate(spec)) if unknown else inputs), spec


def read_by_planner(spec: ModelServeSpec) -> str:
    """The part of a spec that a plan is made from, the model apart: specs of equal texts have equal plans."""
    return json.dumps(_canonical(spec, exclude=NOT_READ_BY_PLANNER), sort_keys=True)


def _first(spec: ModelServeSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """(plan inputs, pod inputs)."""
    pod = _canonical(spec, include={*_OF_PODS, "pod", "rollout"})
    model, extra, rollout = pod.pop("model"), pod.pop("pod", {}), pod.pop("rollout", {})
    address = {key: model.pop(key) for key in ("uri", "revision") if key in model}
    plan = {**_canonical(spec, exclude=NOT_READ_BY_PLANNER), "model": address}
    extra = {key: value for key, value in extra.items() if key not in _PLANNED_POD_FIELDS}
    drain = {key: rollout[key] for key in ("drainSeconds",) if key in rollout}
    return plan, dict(_without_empty({**pod, "model": model, "pod": extra, "rollout": drain}))


def _canonical(
    spec: ModelServeSpec, *, include: set[str] | None = None, exclude: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    document = spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, include=include, exclude=dict(exclude or {})
    )
    return dict(_without_empty(document))


def _without_empty(value: Any) -> Any:
    """Without what an absent field means as well: null, and empty objects and lists."""
    if isinstance(value, Mapping):
        kept = {key: _without_empty(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, {}, [])}
    return [_without_empty(each) for each in value] if isinstance(value, list) else value


_ALGORITHMS: Mapping[int, Callable[[ModelServeSpec], tuple[dict[str, Any], dict[str, Any]]]] = {1: _first}
