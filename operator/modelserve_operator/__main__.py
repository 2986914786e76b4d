"""Composition root: settings, the cluster, the queue and kopf, put together and run until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time

import kopf

from modelserve.api import GROUP, PLURAL
from modelserve.errors import InvalidInput
from modelserve_operator.adapter_reconcile import AdapterReconciler
from modelserve_operator.cache_reconcile import CacheReconciler
from modelserve_operator.cluster.kinds import MODEL_CACHE, OPTIONAL
from modelserve_operator.cluster.kube import ClusterKube, KubeError
from modelserve_operator.cluster.store import Store
from modelserve_operator.gathering.adapter_gatherer import AdapterGatherer
from modelserve_operator.gathering.cache_gatherer import CacheGatherer
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.handlers import build_registry, build_settings
from modelserve_operator.gathering.management_key import ManagementKeys
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.gathering.watchdog import Watchdog, WatchFrozenError
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.process import endpoint, metrics
from modelserve_operator.process.leadership import Leadership, LeaseLostError
from modelserve_operator.process.tasks import until_first_ends, until_signal
from modelserve_operator.process.work_queue import WorkQueue
from modelserve_operator.reconcile import Reconciler
from modelserve_operator.settings import Settings, WorkerAccess, from_environment
from modelserve_operator.writing.apply import Applier

logger = logging.getLogger("modelserve_operator")


async def run(settings: Settings) -> None:
    """Run the operator until a signal. Raises WatchFrozenError, LeaseLostError, KubeError when it cannot go on."""
    store, queue, adapter_queue, cache_queue = Store(), WorkQueue(), WorkQueue(), WorkQueue()
    async with ClusterKube(through_api_proxy=settings.worker_access is WorkerAccess.API_PROXY) as kube:
        shared = SharedConfig(settings.namespace)
        gatherer = Gatherer(
            kube,
            store,
            shared,
            namespaces=settings.watch_namespaces,
            optional=OPTIONAL if settings.model_caches else tuple(kind for kind in OPTIONAL if kind is not MODEL_CACHE),
            passing=settings.passing,
        )
        applier = Applier(kube, store)
        reconciler = Reconciler(gatherer, applier, shared, settings)
        gatherer.reports.told = queue.add
        keys = ManagementKeys(kube, namespace=settings.namespace, name=settings.management_secret)
        adapter_gatherer = AdapterGatherer(kube, store, keys, absent=gatherer.absent)
        gatherer.gone = adapter_gatherer.forget
        adapters = AdapterReconciler(adapter_gatherer, applier, settings.allowed)
        cache_gatherer = CacheGatherer(kube, store)
        caches = CacheReconciler(cache_gatherer, applier, settings, tell=queue.add)
        replanning = Replanning(gatherer, queue, (adapter_gatherer, adapter_queue), (cache_gatherer, cache_queue))
        watchdog = Watchdog(gatherer, replanning, interval=settings.watchdog_seconds, resync=settings.resync_seconds)
        leadership = Leadership(
            kube.leases, name=settings.lease_name, namespace=settings.namespace, holder=settings.lease_holder
        )

        def alive() -> bool:
            return leadership.waiting or watchdog.alive()

        async with (
            endpoint.serve(host=settings.metrics_host, port=settings.metrics_port, alive=alive),
            leadership.held() as keep_lease,
        ):
            watchdog.last_round_trip = time.monotonic()
            await _first_list(gatherer)
            if settings.model_caches and MODEL_CACHE not in gatherer.absent:
                metrics.show_caches(*cache_gatherer.counts())
            replanning.everything()
            watching = kopf.operator(
                registry=build_registry(gatherer, replanning),
                settings=build_settings(),
                # Else kopf asks for the user's name, and a pod's uid need not have one.
                identity=settings.lease_holder,  # type: ignore[arg-type]  # a str, of a type that kopf keeps to itself
                standalone=True,  # the Lease decides who works: peering would write objects of its own
                clusterwide=not settings.watch_namespaces,
                namespaces=settings.watch_namespaces,
            )
            # kopf comes last: on a signal it waits for every task that was started after itself.
            await until_first_ends(
                asyncio.create_task(keep_lease(), name="lease"),
                asyncio.create_task(
                    queue.run(reconciler.reconcile, workers=settings.reconcile_workers, at_first_rest=_keep),
                    name="queue",
                ),
                asyncio.create_task(
                    adapter_queue.run(adapters.reconcile, workers=settings.reconcile_workers), name="adapters"
                ),
                # One at a time: fetches are counted before another one begins.
                asyncio.create_task(cache_queue.run(caches.reconcile, workers=1), name="caches"),
                asyncio.create_task(watchdog.run(), name="watchdog"),
                asyncio.create_task(watching, name="watches"),
            )


def _keep() -> None:
    """What is there now stays: no search for garbage goes through it again, which stops everything (0.4 s at 5,000)."""
    gc.collect()
    gc.freeze()


async def _first_list(gatherer: Gatherer) -> None:
    """Before the first reconcile, so that no decision is made on half a picture."""
    try:
        await gatherer.relist()
    except KubeError as error:
        if error.status == 404:
            raise KubeError(
                404, f"the CRD {PLURAL}.{GROUP} is not installed: kubectl apply -f crds/ ({error})"
            ) from error
        raise


def main() -> None:
    """Console script. Exit code 2: a setting is wrong; 1: the operator could not go on and should be restarted."""
    try:
        settings = from_environment(os.environ)
    except InvalidInput as error:
        sys.exit(_explain(error, code=2))
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it logs every event of every object
    logger.info("settings: %s", settings.model_dump_json())
    try:
        asyncio.run(until_signal(run(settings)))
        logger.info("stopped")
    except (WatchFrozenError, LeaseLostError, KubeError, OSError) as error:
        sys.exit(_explain(error, code=1))


def _explain(error: Exception, *, code: int) -> int:
    sys.stderr.write(f"modelserve-operator: {error}\n")
    return code


if __name__ == "__main__":
    main()
