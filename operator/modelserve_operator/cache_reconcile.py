"""The heartbeat for caches of models: gather, decide, write. One function, safe to run at any moment.

Its key is the ModelCache, in a queue of its own with one reconcile at a time: how many Jobs fetch is counted before
another one is made. The order of writes is what an operator that ends between any two of them is safe by: the finalizer
comes before the first byte; what a Job has brought is in the status before the Job goes; the finalizer goes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from modelserve_operator.caches.decision import CacheDecision, decide
from modelserve_operator.caches.reasons import CacheReason
from modelserve_operator.cluster.kinds import JOB
from modelserve_operator.gathering.cache_gatherer import CacheGatherer
from modelserve_operator.manifests.cache_jobs import JobImage
from modelserve_operator.observed.transitions import Finding
from modelserve_operator.process import metrics
from modelserve_operator.process.work_queue import Key
from modelserve_operator.settings import Settings
from modelserve_operator.writing.apply import Applier, WriteError
from modelserve_operator.writing.cache_writer import CacheWriter, namespace_goes
from modelserve_operator.writing.status_contest import StatusContests

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 30.0
GONE_SECONDS = 2.0  # until the watch has told that an object is no more


class CacheReconciler:
    """Reconciles a ModelCache at a time, each time from what is observed."""

    def __init__(
        self, gatherer: CacheGatherer, applier: Applier, settings: Settings, *, tell: Callable[[Key], None]
    ) -> None:
        """`tell`: called with each ModelServe for which a cache stands otherwise than before; what we write ourselves
        comes back as an echo, which tells nobody."""
        self._gatherer, self._applier, self._settings, self._tell = gatherer, applier, settings, tell
        self._statuses = StatusContests()
        self._image = JobImage(
            image=settings.worker_image,
            pull_policy=settings.image_pull_policy,
            pull_secrets=settings.image_pull_secrets,
            architectures=settings.worker_architectures,
            user_id=settings.pod_user_id,
        )

    async def reconcile(self, key: Key) -> float | None:
        """Bring one ModelCache a step nearer to its spec. Returns seconds until it is to be looked at again; None: it
        is gone. A status or a finalizer that could not be written is raised in the end, for the queue to back off.
        """
        metrics.show_caches(*self._gatherer.counts())
        snapshot = await self._gatherer.observe(key)
        if snapshot is None:
            self._statuses.forget(key)
            return None
        decision = decide(snapshot, self._image, most_fetches=self._settings.cache_fetches)
        writer = CacheWriter(self._applier, self._statuses, decision)
        if decision.hold:
            held = await writer.hold()
            if writer.failures:
                raise writer.failures[0]
            return 0.0 if held else GONE_SECONDS  # it is another object now, which is decided on anew
        refused = await writer.make()
        if namespace_goes(refused) and snapshot.leaving:
            await writer.abandon()
            return None
        if refused is not None:
            writer = CacheWriter(self._applier, self._statuses, _refused(decision, refused))
        if decision.release:
            await writer.discard()
            if not writer.failures:
                await writer.release()
        elif await writer.report():
            metrics.show_caches(*self._gatherer.counts())
            for name in snapshot.users if writer.turned else ():
                self._tell(Key(key.namespace, name))
            await writer.discard()
        if writer.failures:
            raise writer.failures[0]
        return REFUSED_SECONDS if refused is not None else decision.again


def _refused(decision: CacheDecision, error: WriteError) -> CacheDecision:
    """The decision without what the API server does not take, and with its words. What ModelServes read stays."""
    logger.warning("%s/%s: %s", *decision.snapshot.key, error)
    kind = JOB.kind if decision.start is not None else "claim"
    message = f"A {kind} that it needs cannot be made: {error}. It is tried again."
    ready = decision.finding.ready
    finding = Finding(ready, CacheReason.WRITE_REFUSED, f"{decision.finding.message} {message}" if ready else message)
    return replace(decision, finding=finding, start=None, claim=None, discard=())
