"""Reads from Events why Kubernetes does not get on with an object, in its own words; they are asked for only then.

A mount that fails, a sandbox that cannot be made and a Job whose pods a quota refuses leave no trace in any status.
I/O, but no writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from modelserve_operator.cluster.kube import Kube, KubeError

logger = logging.getLogger(__name__)

KEPT = timedelta(seconds=30)
_OF_THE_PAST = frozenset({"FailedScheduling"})  # of a pod that has its node by now


class Causes:
    """Events are not watched: there are more of them than of all else together."""

    def __init__(self, kube: Kube, clock: Callable[[], datetime]) -> None:
        self._kube = kube
        self._clock = clock
        self._known: dict[str, tuple[datetime, str | None]] = {}  # uid -> until when, words
        self._denied = False

    async def of(self, namespace: str, uid: str) -> str | None:
        """The newest Event about the object, where that is a warning; None else, or where Events cannot be read.

        What came before something that went well has been overcome.
        """
        now = self._clock()
        until, words = self._known.get(uid, (now, None))
        if now < until:
            return words
        self._known = {key: entry for key, entry in self._known.items() if now < entry[0]}
        try:
            events = await self._kube.events_about(namespace=namespace, uid=uid)
        except KubeError as error:
            if error.status == 403 and not self._denied:
                logger.warning("Events cannot be read, so causes that stand only there stay unsaid: %s", error)
            self._denied = error.status == 403
            events = []
        newest = max(events, key=_when, default=None)
        telling = newest is not None and newest.get("type") == "Warning" and newest.get("reason") not in _OF_THE_PAST
        words = f"{newest.get('reason')}: {newest.get('message')}" if newest is not None and telling else None
        self._known[uid] = (now + KEPT, words)
        return words


def _when(event: Mapping[str, Any]) -> str:
    """When it last happened, as text of one format: writers of Events fill in one field or another."""
    found = [(event.get("series") or {}).get("lastObservedTime")]
    found += [event.get(field) for field in ("lastTimestamp", "eventTime", "firstTimestamp")]
    return max((str(time).rstrip("Z") for time in found if time), default="")
