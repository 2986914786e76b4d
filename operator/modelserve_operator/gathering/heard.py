"""What one event, or one LIST, may concern. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_ADAPTER, MODEL_CACHE, MODEL_SERVE, REFERENCE_GRANT, ResourceKind
from modelserve_operator.process.work_queue import Key
from modelserve_operator.sources import cache_named

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Heard:
    """Single ModelServes, the supply that all plans are made from, ModelServes whose adapters are concerned, which need
    not exist, namespaces that grant something else than before, and ModelCaches."""

    keys: frozenset[Key] = frozenset()
    supply: bool = False
    adapters: frozenset[Key] = frozenset()
    granting: frozenset[str] = frozenset()
    caches: frozenset[Key] = frozenset()

    def __or__(self, other: Heard) -> Heard:
        return Heard(
            self.keys | other.keys,
            self.supply or other.supply,
            self.adapters | other.adapters,
            self.granting | other.granting,
            self.caches | other.caches,
        )


NOTHING = Heard()


def heard_of(kind: ResourceKind, body: Body) -> Heard:
    """What an object that tells of a ModelServe or its adapters may concern."""
    namespace = str(body["metadata"].get("namespace") or "")
    if kind is MODEL_SERVE:
        return Heard(frozenset({Key(namespace, str(body["metadata"]["name"]))}))
    if kind is MODEL_ADAPTER:
        target = target_of(body)
        return Heard(adapters=frozenset({target})) if target is not None else NOTHING
    if kind is MODEL_CACHE:
        return Heard(caches=frozenset({Key(namespace, str(body["metadata"]["name"]))}))
    if cache := labels.label_of(body, labels.CACHE):
        return Heard(caches=frozenset({Key(namespace, cache)}))
    if kind is REFERENCE_GRANT:
        return Heard(granting=frozenset({namespace}))
    owner = labels.label_of(body, labels.NAME)
    return Heard(frozenset({Key(namespace, owner)})) if owner else NOTHING


def readers_of(caches: frozenset[Key], model_serves: Iterable[Body]) -> Heard:
    """The ModelServes that name one of these ModelCaches."""
    named = ((body["metadata"], cache_named(body)) for body in model_serves)
    found = (each for each, cache in named if cache is not None and Key(each["namespace"], cache) in caches)
    return Heard(frozenset(Key(each["namespace"], each["name"]) for each in found))


def target_of(body: Body) -> Key | None:
    """The ModelServe that an (unvalidated) ModelAdapter refers to."""
    spec = body.get("spec")
    reference = spec.get("modelRef") if isinstance(spec, Mapping) else None
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name"), str):
        return None
    return Key(str(reference.get("namespace") or body["metadata"]["namespace"]), str(reference["name"]))
