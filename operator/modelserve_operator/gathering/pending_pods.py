"""Pods of anybody that have no node, asked for when a rollout is about to stop a worker; I/O, but no writes.

They are not watched: most are nobody's concern here. All that ask within a moment share one LIST. It comes in pages, of
which only pods that ask for devices are kept: with resourceVersion 0 it would come whole, of any size, and might miss
those of the last seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM_TEMPLATE, RESOURCE_CLAIM, ResourceKind
from modelserve_operator.cluster.kube import Kube, KubeError
from modelserve_operator.inventory.pools import Inventory
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.process.work_queue import Key
from modelserve_operator.revisions.revision import Revision
from modelserve_operator.rollout import rivals
from modelserve_operator.rollout.rivals import Ground

logger = logging.getLogger(__name__)
Body = Mapping[str, Any]

KEPT = timedelta(seconds=10)
CLAIMS_KEPT = timedelta(seconds=60)
MOST_CLAIMS = 50  # that are read for one answer; a pod whose claims are not read counts


class PendingPods:
    """Who would take what a rollout gives up, and since when a rollout waits for them."""

    def __init__(
        self,
        kube: Kube,
        inventory: Inventory,
        clock: Callable[[], datetime],
        *,
        known: Callable[[Key], tuple[Body | None, tuple[Body, ...]]] = lambda _: (None, ()),
        namespaces: tuple[str, ...] = (),
    ) -> None:
        """`known`: a ModelServe and its workers."""
        self._kube = kube
        self._inventory = inventory
        self._clock = clock
        self._known = known
        self._namespaces = namespaces
        self._listed: tuple[datetime, tuple[Body, ...]] | None = None  # when, which
        self._listing = asyncio.Lock()
        self._claims: dict[tuple[ResourceKind, str, str], tuple[datetime, Body | None]] = {}  # until when, what
        self._waits: dict[Key, tuple[str, datetime, datetime]] = {}  # revision, since when, when last asked about

    async def rivals(self, observed: Observed, target: Revision) -> tuple[str, ...]:
        """Whose pods would take the place of a worker that makes room for the target, in words; none for a plan on the
        CPU, nor once this rollout has waited for such pods for long enough, whoever they were. Raises KubeError.
        """
        if target.plan.resource_name is None:
            return ()
        key, now = Key(observed.namespace, observed.name), self._clock()
        names = {pod.node for pod in observed.workers if pod.ready and pod.plan_hash != target.hash}
        grounds = [self._ground(name) for name in names]
        found: list[Body] = []
        elsewhere, reads = False, MOST_CLAIMS
        for pod, admitting in rivals.able(await self._unplaced(now), observed, target, grounds, now):
            other = pod["metadata"]["namespace"] != observed.namespace
            if other and elsewhere:
                continue  # they are told as one
            takes = rivals.takes(pod, target)
            for claim in () if takes else pod["spec"].get("resourceClaims") or ():
                reads -= 1
                spec = await self._claim(pod, claim, now) if reads >= 0 else {}
                takes = takes or (spec is not None and (not spec or rivals.by_claim(spec, target, admitting)))
            if takes and not self._exchanges(pod, names):
                found.append(pod)
                elsewhere = elsewhere or other
        if not found:
            self._waits.pop(key, None)
            return ()
        revision, since, _ = self._waits.get(key, ("", now, now))
        since = since if revision == target.hash else now
        self._waits = {each: wait for each, wait in self._waits.items() if now - wait[2] < 2 * rivals.PATIENCE}
        self._waits[key] = (target.hash, since, now)
        return rivals.named(found, observed) if now - since < rivals.PATIENCE else ()

    def _exchanges(self, pod: Body, names: set[str | None]) -> bool:
        name = labels.label_of(pod, labels.NAME)
        if name is None:
            return False
        model_serve, workers = self._known(Key(pod["metadata"]["namespace"], name))
        return rivals.exchanges(pod, model_serve, workers, self._inventory.alike(names))

    def _ground(self, name: str | None) -> Ground:
        known = self._inventory.node(name) if name is not None else None
        return Ground(*known) if known is not None else Ground()

    async def _unplaced(self, now: datetime) -> tuple[Body, ...]:
        async with self._listing:
            if self._listed is None or now - self._listed[0] >= KEPT:
                kept: list[Body] = []
                for namespace in self._namespaces or (None,):
                    async for page in self._kube.unplaced_pods(namespace=namespace):
                        kept += [_trimmed(pod) for pod in page if rivals.asks(pod)]
                self._listed = now, tuple(kept)
            return self._listed[1]

    async def _claim(self, pod: Body, claim: Body, now: datetime) -> Body | None:
        """Spec of what a pod claims; empty where it cannot be read, None where there is no such claim, so that the pod
        cannot start, or where it is allocated, so that the pod takes nothing more.
        """
        kind, name = RESOURCE_CLAIM, claim.get("resourceClaimName")
        if name is None:
            kind, name = CLAIM_TEMPLATE, claim.get("resourceClaimTemplateName")
        if not isinstance(name, str):
            return {}
        place = (kind, pod["metadata"]["namespace"], name)
        until, known = self._claims.get(place, (now, None))
        if now < until:
            return known
        self._claims = {each: entry for each, entry in self._claims.items() if now < entry[0]}
        try:
            body = await self._kube.get(kind, namespace=place[1], name=name)
        except KubeError as error:
            logger.warning("%s %s/%s cannot be read, so its pod counts: %s", kind.kind, place[1], name, error)
            self._claims[place] = (now + CLAIMS_KEPT, {})
            return {}
        spec: Body | None = None
        if body is not None and not (body.get("status") or {}).get("allocation"):
            spec = body["spec"] if kind is RESOURCE_CLAIM else body["spec"].get("spec") or {}
        self._claims[place] = (now + KEPT, spec)
        return spec


_METADATA = ("name", "namespace", "creationTimestamp", "deletionTimestamp", "ownerReferences")
_SPEC = ("nodeSelector", "affinity", "tolerations", "resourceClaims", "schedulingGates", "priority")


def _trimmed(pod: Body) -> Body:
    """What rivals are told by: there may be thousands of pods without a node."""
    spec, metadata = pod["spec"], pod["metadata"]
    containers = {
        kind: [{"resources": each.get("resources")} for each in spec.get(kind) or ()]
        for kind in ("containers", "initContainers")
    }
    conditions = [each for each in (pod.get("status") or {}).get("conditions") or () if each["type"] == "PodScheduled"]
    own = {key: labels.label_of(pod, key) for key in (labels.NAME, labels.PLAN_HASH)}
    return {
        "metadata": {**{key: metadata[key] for key in _METADATA if key in metadata}, "labels": own},
        "spec": {**{key: spec[key] for key in _SPEC if key in spec}, **containers},
        "status": {"conditions": conditions},
    }
