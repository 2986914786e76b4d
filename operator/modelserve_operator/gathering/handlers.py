"""Every kopf handler. Each one tells the store what it heard, and has the keys it concerns put into the queue."""

from __future__ import annotations

from typing import Any

import kopf

from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CHILDREN, OPTIONAL, ResourceKind
from modelserve_operator.cluster.kube import PAGE_SIZE
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.process import metrics


def build_registry(gatherer: Gatherer, replanning: Replanning) -> kopf.OperatorRegistry:
    """Handlers of raw events only: no create, update or delete handler, no timer, no daemon (docs/decisions/0002)."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    def register(kind: ResourceKind) -> None:
        async def heard(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf passes it by this name
            metrics.WATCH_EVENTS.labels(kind.kind).inc()
            replanning.note(gatherer.hear(kind, dict(body), deleted=type == "DELETED"))

        kopf.on.event(kind.group, kind.version, kind.plural, id=f"heard-{kind.plural}", registry=registry)(heard)

    # A watch of what is not there would only fail: such kinds are listed from time to time (see Watchdog).
    there = [kind for kind in gatherer.optional if kind not in gatherer.absent]
    for kind in (*gatherer.watched, *there):
        register(kind)
    return registry


class _NothingHandledBefore(kopf.DiffBaseStorage):
    """kopf compares every object with what was handled before, by copies of it all; no handler here asks for that."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def build_settings() -> kopf.OperatorSettings:
    """kopf's own settings: children are filtered by the API server, and kopf writes nothing, events included."""
    configured = kopf.OperatorSettings()
    configured.posting.enabled = False
    # Namespaces and definitions are not looked at: the first list has shown that ours is there, and looking costs leave
    # for the whole cluster, or half a minute of refused requests without it.
    configured.scanning.disabled = True
    configured.watching.chunk_size = PAGE_SIZE  # of the first LIST, so that its peak in memory is bounded
    # A stream that brings neither an event nor one of the API server's bookmarks, which come once a minute, has frozen:
    # it is asked for again, from where it stopped.
    configured.watching.inactivity_timeout = 70.0
    configured.persistence.diffbase_storage = _NothingHandledBefore()
    configured.networking.error_backoffs = (1, 2, 3, 5, 8, 13)
    configured.queueing.idle_timeout = 0.05  # nothing waits per object, and each task keeps its last event meanwhile
    configured.queueing.exit_timeout = 0.5
    for kind in (*CHILDREN, *(kind for kind in OPTIONAL if kind.owned)):
        configured.watching.label_selectors[kind.group, kind.version, kind.plural] = labels.WATCH_SELECTOR
    return configured
