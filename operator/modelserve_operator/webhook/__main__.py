"""Composition root of the webhook: settings, the cluster's inventory and its watches, the certificate, the server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

import kopf

from modelserve.errors import InvalidInput
from modelserve_operator.cluster.kinds import NODE, OPTIONAL_SUPPLY
from modelserve_operator.cluster.kube import ClusterKube, KubeError
from modelserve_operator.cluster.store import Store
from modelserve_operator.gathering.gather import Gatherer
from modelserve_operator.gathering.handlers import build_registry, build_settings
from modelserve_operator.gathering.replanning import Replanning
from modelserve_operator.gathering.watchdog import Watchdog, WatchFrozenError
from modelserve_operator.learning.shared_config import SharedConfig
from modelserve_operator.process import endpoint
from modelserve_operator.process.tasks import until_first_ends, until_signal
from modelserve_operator.process.work_queue import WorkQueue
from modelserve_operator.settings import WebhookSettings, read
from modelserve_operator.webhook.reading import Reader
from modelserve_operator.webhook.server import Previewer, ServedCertificate, serve
from modelserve_operator.webhook.trust import Trust
from modelserve_operator.webhook.warm_supply import WarmSupply

logger = logging.getLogger("modelserve_operator.webhook")


async def run(settings: WebhookSettings) -> None:
    """Answer reviews until a signal. Raises WatchFrozenError and KubeError when it cannot go on."""
    async with ClusterKube(through_api_proxy=False) as kube:
        shared = SharedConfig(settings.namespace)
        gatherer = Gatherer(kube, Store(), shared, watched=(NODE,), optional=OPTIONAL_SUPPLY, passing=settings.passing)
        replanning = Replanning(gatherer, WorkQueue())  # nothing is queued: objects come with their reviews
        watchdog = Watchdog(gatherer, replanning, interval=settings.watchdog_seconds, resync=settings.resync_seconds)
        served = ServedCertificate()
        trust = Trust(
            kube,
            namespace=settings.namespace,
            secret=settings.webhook_secret,
            configuration=settings.webhook_configuration,
            hosts=settings.webhook_hosts,
            serve=served.show,
        )
        async with endpoint.serve(host=settings.metrics_host, port=settings.metrics_port, alive=watchdog.alive):
            await gatherer.relist()
            watchdog.last_round_trip = time.monotonic()
            await trust.round()
            supply = WarmSupply(gatherer)
            await supply.first()
            previewer = Previewer(Reader(kube, lambda: supply.now), settings)
            async with serve(previewer, served.context, host=settings.webhook_host, port=settings.webhook_port):
                watching = kopf.operator(
                    registry=build_registry(gatherer, replanning),
                    settings=build_settings(),
                    identity=settings.lease_holder,  # type: ignore[arg-type]  # a str, of a type that kopf keeps to itself
                    standalone=True,
                    clusterwide=True,
                )
                await until_first_ends(
                    asyncio.create_task(trust.keep(), name="trust"),
                    asyncio.create_task(supply.follow(), name="supply"),
                    asyncio.create_task(watchdog.run(), name="watchdog"),
                    asyncio.create_task(watching, name="watches"),
                )


def main() -> None:
    """Console script. Exit code 2: a setting is wrong; 1: it could not go on and should be restarted."""
    try:
        settings = read(WebhookSettings, os.environ)
    except InvalidInput as error:
        sys.stderr.write(f"modelserve-webhook: {error}\n")
        sys.exit(2)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(until_signal(run(settings)))
        logger.info("stopped")
    except (WatchFrozenError, KubeError, OSError) as error:
        sys.stderr.write(f"modelserve-webhook: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
