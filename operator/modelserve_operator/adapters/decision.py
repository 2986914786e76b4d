"""What workers of a ModelServe should have of its ModelAdapters, and which of these may go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.api.model_adapter import ModelAdapterSpec
from modelserve_operator import labels
from modelserve_operator.adapters.acceptance import Refusal, in_order, refusals, worker_address
from modelserve_operator.adapters.snapshot import READY, Adapter, AdapterSnapshot, AdapterWorker
from modelserve_operator.adapters.versions import Version, Versions, versions
from modelserve_operator.allowed import AllowRule, address_not_allowed
from modelserve_operator.observed.snapshot import moment

DRAIN_MARGIN = timedelta(seconds=60)  # beside the drainSeconds of the ModelServe
DRAIN_SECONDS = 60  # of one that is gone, or whose spec cannot be read
POLL_SECONDS, SILENT_SECONDS, REST_SECONDS = 2.0, 15.0, 60.0


@dataclass(frozen=True)
class Taken:
    """An adapter that is served, or to be."""

    adapter: Adapter
    spec: ModelAdapterSpec
    versions: Versions

    def ready_on(self, snapshot: AdapterSnapshot) -> bool:
        """Whether every worker serves the version of the spec."""
        name, target = self.adapter.served_name, self.versions.target
        return bool(snapshot.counted) and all(worker.serves(name, target.id) for worker in snapshot.counted)

    def weights(self, worker: AdapterWorker | None) -> dict[str, int]:
        """Percent of requests by version, as the worker should answer them: a version that is to take over has none
        where it is not Ready. None: a worker that starts, which has nothing yet."""
        found = self.versions
        if found.coming is None or found.active is None:
            return {each.id: 100 for each in found.wanted}
        ready = worker is not None and worker.serves(self.adapter.served_name, found.coming.id)
        return {found.active.id: 100 - found.weight * ready, found.coming.id: found.weight * ready}

    def answered_by(self, worker: AdapterWorker) -> bool:
        """Whether the worker says that it answers by these weights and with no other version; of one that says no
        weights it is taken to."""
        name, wanted = self.adapter.served_name, self.weights(worker)
        ready = [each for each in worker.loaded or () if each.name == name and each.state == READY]
        if any(each.id not in wanted for each in ready):
            return False
        return len(ready) < 2 or all(each.weight in (None, wanted[each.id]) for each in ready)


@dataclass(frozen=True)
class AdapterDecision:
    """`taken`: by the name that they are served under. `refused`: by uid. `holds`: workers keep what they have, since
    the ModelServe cannot be read. `released`: being deleted, and nothing of them is left to wait for; `abandoned`:
    those of them whose time was over before every worker had said so."""

    snapshot: AdapterSnapshot
    taken: tuple[Taken, ...]
    refused: dict[str, Refusal]
    holds: bool
    released: tuple[Adapter, ...]
    abandoned: frozenset[str]

    @property
    def unheld(self) -> tuple[Adapter, ...]:
        """Adapters whose deletion should wait for us, and does not yet."""
        return tuple(each.adapter for each in self.taken if not each.adapter.held)

    @property
    def manages(self) -> bool:
        """Whether workers are told what to have: those of a ModelServe with room for adapters."""
        spec = self.snapshot.spec
        return spec is not None and spec.adapters is not None and not self.holds

    def without(self, uids: frozenset[str]) -> AdapterDecision:
        """The same, in which workers do not get these."""
        return replace(self, taken=tuple(each for each in self.taken if each.adapter.uid not in uids))

    def without_takeovers(self, uids: frozenset[str]) -> AdapterDecision:
        """The same, in which the old versions of these stay beside the new: that they were taken over is not kept."""
        found = (
            replace(each, versions=each.versions.before_takeover()) if each.adapter.uid in uids else each
            for each in self.taken
        )
        return replace(self, taken=tuple(found))

    def desired(self, worker: AdapterWorker | None, *, secrets: bool = True) -> dict[str, Any]:
        """The whole set, as PUT /v1/adapters takes it. `worker`: see Taken.weights."""
        spec = self.snapshot.spec
        assert spec is not None, "nothing is desired of what cannot be read"
        return {"adapters": [_entry(each, worker, spec, secrets=secrets) for each in self.taken]}


def decide(snapshot: AdapterSnapshot, rules: Sequence[AllowRule]) -> AdapterDecision:
    """From the snapshot alone. Second versions get what room is left once every adapter has its own, the oldest
    first."""
    refused = refusals(snapshot, rules)
    holds = snapshot.model_serve is not None and snapshot.spec is None
    taken: list[Taken] = []
    room = _room(snapshot)
    accepted = [each for each in in_order(snapshot) if each.uid not in refused]
    left = room - len(accepted)
    for adapter in accepted:
        assert adapter.spec is not None, "an invalid one is refused"
        found = _believed(adapter, versions(adapter, snapshot), snapshot, rules)
        if found.coming is not None and left <= 0:
            found = found.without_room()
        left -= found.coming is not None
        taken.append(Taken(adapter, adapter.spec, found))
    kept = tuple(sorted(taken, key=lambda each: each.adapter.served_name))
    leaving = [each for each in snapshot.adapters if each.leaving and each.held]
    drained = {each.uid: _drained(each, kept, snapshot, holds=holds) for each in leaving}
    late = frozenset(each.uid for each in leaving if not drained[each.uid] and _overdue(each, snapshot))
    released = tuple(each for each in leaving if drained[each.uid] or each.uid in late)
    return AdapterDecision(snapshot, kept, refused, holds, released, late)


def look_again(decision: AdapterDecision) -> float:
    """Seconds until workers are asked again: soon while something is on its way, and now and then at rest."""
    snapshot = decision.snapshot
    if not snapshot.adapters:
        return REST_SECONDS
    if any(worker.counts and worker.loaded is None for worker in snapshot.workers):
        return SILENT_SECONDS
    moving = any(each.held and each.leaving for each in snapshot.adapters)
    for taken in decision.taken:
        name = taken.adapter.served_name
        for worker in snapshot.counted:
            told = [worker.version(name, version.id) for version in taken.versions.wanted]
            moving = moving or any(each is None or each.state in ("Loading", "Draining") for each in told)
            moving = moving or not taken.answered_by(worker)
    return POLL_SECONDS if moving else REST_SECONDS


def version_ids(adapter: Adapter) -> frozenset[str]:
    """Of all versions that workers may have of it."""
    shown = (adapter.status.get(field) or {} for field in ("activeVersion", "nextVersion", "previousVersion"))
    ids = {str(each.get("id")) for each in shown if each.get("id")}
    if adapter.spec is not None:
        ids.add(Version(adapter.spec.uri, adapter.spec.revision).id)
    return frozenset(ids)


def digest_of(desired: dict[str, Any]) -> str:
    """Tells sets apart, secrets included."""
    return labels.short_hash(desired)


def _room(snapshot: AdapterSnapshot) -> int:
    adapters = snapshot.spec.adapters if snapshot.spec is not None else None
    return adapters.max if adapters is not None else 0


def _believed(adapter: Adapter, found: Versions, snapshot: AdapterSnapshot, rules: Sequence[AllowRule]) -> Versions:
    """Without an active version that nobody may ask for (any more): a status may be somebody else's writing."""
    active = found.active
    if active is None or active.id == found.target.id:
        return found
    allowed = address_not_allowed(active.uri, adapter.key.namespace, rules) is None
    if allowed and snapshot.spec is not None and _address(adapter, active, snapshot.spec) is not None:
        return found
    return replace(found, active=None, coming=None, weight=0)


def _address(adapter: Adapter, version: Version, spec: ModelServeSpec) -> str | None:
    assert adapter.spec is not None, "an invalid one is refused"
    return worker_address(replace(adapter, spec=adapter.spec.model_copy(update={"uri": version.uri})), spec)


def _entry(taken: Taken, worker: AdapterWorker | None, spec: ModelServeSpec, *, secrets: bool) -> dict[str, Any]:
    weights, name = taken.weights(worker), taken.adapter.served_name
    entries = []
    for version in taken.versions.wanted:
        entry: dict[str, Any] = {
            "id": version.id,
            "uri": _address(taken.adapter, version, spec),
            "weight": weights[version.id],
            "pin": taken.spec.pin,
        }
        if version.revision is not None:
            entry["revision"] = version.revision
        if secrets and taken.adapter.token is not None:
            entry["token"] = taken.adapter.token
        entries.append(entry)
    return {"name": name, "versions": entries}


def _drained(adapter: Adapter, taken: Sequence[Taken], snapshot: AdapterSnapshot, *, holds: bool) -> bool:
    """Whether no worker has it any more. A worker that cannot be asked may have it; where nobody is told what to have,
    nobody has to be waited for."""
    if snapshot.model_serve is None or (not holds and _room(snapshot) == 0):
        return True
    if holds:
        return False
    name = adapter.served_name
    wanted = {version.id for each in taken if each.adapter.served_name == name for version in each.versions.wanted}
    gone = version_ids(adapter) - wanted
    for worker in snapshot.counted:
        if worker.loaded is None and worker.may_have_adapters:
            return False
        if any(each.name == name and each.id in gone for each in worker.loaded or ()):
            return False
    return True


def _overdue(adapter: Adapter, snapshot: AdapterSnapshot) -> bool:
    began = moment(adapter.body["metadata"].get("deletionTimestamp"))
    seconds = snapshot.spec.rollout.drain_seconds if snapshot.spec is not None else DRAIN_SECONDS
    return began is None or snapshot.now - began >= timedelta(seconds=seconds) + DRAIN_MARGIN
