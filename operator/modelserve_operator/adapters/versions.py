"""Which versions of an adapter workers should have, and which of them serves. Pure.

What served last is in the status of the object, so that an operator which starts anew goes on from there. The old
version goes only when the new one is Ready on every
worker that counts, and that it took over is in the status before any worker is told to let the old one go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from modelserve.api.model_adapter import AdapterVersion, ModelAdapterSpec
from modelserve.api.unknown_fields import without_unknown
from modelserve.model.adapters.addresses import default_revision
from modelserve_operator import labels
from modelserve_operator.adapters.snapshot import BROKEN, Adapter, AdapterSnapshot


@dataclass(frozen=True)
class Version:
    """An address and a revision."""

    uri: str
    revision: str | None = None

    @property
    def id(self) -> str:
        """Equal for what is the same: the Hub's revision is main where none is named."""
        revision = self.revision or default_revision(self.uri) or ""
        return labels.short_hash([self.uri, revision])


@dataclass(frozen=True)
class Versions:
    """Of one adapter. `active`: what serves; `coming`: the spec's, where it is another one and there is room for it.

    `weight`: percent of requests that `coming` answers on workers where it is Ready. `crowded`: it waits for room.
    """

    target: Version
    active: Version | None = None
    coming: Version | None = None
    previous: Version | None = None
    weight: int = 0
    crowded: bool = False
    takes_over: bool = False  # `target` serves from now on, in place of `previous`

    @property
    def wanted(self) -> tuple[Version, ...]:
        """What workers should have."""
        return tuple(each for each in (self.active or self.target, self.coming) if each is not None)

    def before_takeover(self) -> Versions:
        """The same, as long as that is not kept."""
        if not self.takes_over:
            return self
        return replace(self, active=self.previous, coming=self.target, previous=None, weight=100, takes_over=False)

    def without_room(self) -> Versions:
        """The same, where a second version has no place."""
        return replace(self, coming=None, weight=0, crowded=self.coming is not None)


def target_of(spec: ModelAdapterSpec) -> Version:
    """The version that the spec names."""
    return Version(spec.uri, spec.revision)


def versions(adapter: Adapter, snapshot: AdapterSnapshot) -> Versions:
    """What becomes of an adapter that is taken."""
    assert adapter.spec is not None, "an invalid one is not taken"
    name, target, workers = adapter.served_name, target_of(adapter.spec), snapshot.counted
    active, previous = _shown(adapter.status, "activeVersion"), _shown(adapter.status, "previousVersion")
    somewhere = any(worker.serves(name, target.id) for worker in workers)
    everywhere = bool(workers) and all(worker.serves(name, target.id) for worker in workers)
    if active is None or active.id == target.id:
        serves = active is not None or somewhere
        return Versions(target, target if serves else None, previous=previous)
    if everywhere and adapter.spec.rollout.weight == 100:
        return Versions(target, target, previous=active, takes_over=True)
    coming = adapter.status.get("nextVersion") or {}
    opened = everywhere or (coming.get("id") == target.id and int(coming.get("weight") or 0) > 0)
    weight = adapter.spec.rollout.weight if opened else 0
    return Versions(target, active, target, previous=previous, weight=weight)


def _shown(status: Mapping[str, Any], field: str) -> Version | None:
    """A version that a status names; None where there is none, or none of ours."""
    found = status.get(field)
    if not isinstance(found, Mapping):
        return None
    try:
        known, _ = without_unknown(AdapterVersion, found)
        read = AdapterVersion.model_validate(known)
    except ValidationError:
        return None
    return Version(read.uri, read.revision) if Version(read.uri, read.revision).id == read.id else None


def broken(version: Version, name: str, snapshot: AdapterSnapshot) -> bool:
    """Whether a worker says that the version cannot be served."""
    found = (worker.version(name, version.id) for worker in snapshot.counted)
    return any(each is not None and each.state in BROKEN for each in found)
