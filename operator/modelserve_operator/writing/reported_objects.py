"""Writes what a kind of ours has beside its spec: its status, and the finalizer by which deletions wait for us."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from modelserve_operator.cluster.kinds import ResourceKind
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.cluster.store import key_of
from modelserve_operator.process.work_queue import Key
from modelserve_operator.writing.apply import Applier, WriteError
from modelserve_operator.writing.status_contest import StatusContestedError, StatusContests

Body = Mapping[str, Any]


class ReportedObjects:
    """Of one kind, in one reconcile. A write that fails is added to `failures`, but where the object is gone."""

    def __init__(
        self,
        applier: Applier,
        statuses: StatusContests,
        kind: ResourceKind,
        *,
        finalizer: str,
        failures: list[WriteError],
    ) -> None:
        self._applier, self._statuses, self._kind = applier, statuses, kind
        self._finalizer, self._failures = finalizer, failures

    async def replace(self, body: Body, status: Mapping[str, Any], *, now: datetime) -> bool:
        """Whether the status was written: it is not while somebody else writes it, too, and it is not our turn."""
        key, before = Key(*key_of(body)), body.get("status") or {}
        try:
            self._statuses.turn(key, before, now)
            await self._applier.patch(
                self._kind, body, [{"op": "add", "path": "/status", "value": status}], subresource="status"
            )
        except StatusContestedError:
            return False
        except KubeError as error:
            if error.status != 404:  # deleted meanwhile: its own event brings us back
                self._failures.append(error)
            return False
        self._statuses.wrote(key, status, over=before, now=now)
        return True

    async def finalize(self, body: Body, *, held: bool) -> bool:
        """Add our finalizer, or take it away; whether that was written."""
        others = [each for each in body["metadata"].get("finalizers") or () if each != self._finalizer]
        finalizers = [*others, self._finalizer] if held else others
        operation = {"op": "add", "path": "/metadata/finalizers", "value": finalizers}
        try:
            await self._applier.patch(self._kind, body, [operation])
        except KubeError as error:
            if error.status != 404:
                self._failures.append(error)
            return False
        return True


def with_foreign_conditions(status: dict[str, Any], before: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Conditions of types that are not ours stay."""
    foreign = [each for each in before.get("conditions") or () if each.get("type") not in own]
    return {**status, "conditions": [*status["conditions"], *foreign]}
