"""Access modes of the claims that ModelServes name: read when needed, and kept for a while; I/O, but no writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from modelserve_operator.cluster.kinds import CLAIM
from modelserve_operator.cluster.kube import Kube

KEPT = timedelta(seconds=50)  # the modes of a claim that exists cannot be changed; it may be made anew
KEPT_ABSENT = timedelta(seconds=10)


class ClaimModes:
    """Claims are not watched: all of a cluster's would be heard of for the few that matter."""

    def __init__(self, kube: Kube, clock: Callable[[], datetime]) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[datetime, tuple[str, ...] | None]] = {}  # until when, modes

    async def of(self, namespace: str, name: str) -> tuple[str, ...] | None:
        """Access modes, bound ones if there are any; None for a claim that is not there. Raises KubeError."""
        now = self._clock()
        until, modes = self._known.get((namespace, name), (now, None))
        if now < until:
            return modes
        self._known = {key: entry for key, entry in self._known.items() if now < entry[0]}
        modes = await self._read(namespace, name)
        self._known[namespace, name] = (now + (KEPT_ABSENT if modes is None else KEPT), modes)
        return modes

    async def _read(self, namespace: str, name: str) -> tuple[str, ...] | None:
        claim = await self._kube.get(CLAIM, namespace=namespace, name=name)
        if claim is None:
            return None
        bound = (claim.get("status") or {}).get("accessModes")
        return tuple(bound or claim["spec"].get("accessModes") or ())
