"""HTTPS for the API server: one review in, its warnings out. Whatever happens, nothing is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.process import metrics
from modelserve_operator.settings import Settings
from modelserve_operator.webhook.certificates import Pair
from modelserve_operator.webhook.preview import preview
from modelserve_operator.webhook.reading import Reader
from modelserve_operator.webhook.review import NotAReviewError, Review, answer, review_of
from modelserve_operator.webhook.turns import Turns
from modelserve_operator.webhook.warning_lines import warning_lines

logger = logging.getLogger(__name__)

PATH = "/preview"
LARGEST_REVIEW = 2 << 20  # bytes: two states of an object, which the schema's bounds keep far below 1 MiB each
MOST_SECONDS = 30  # that an API server may wait
WAITS = re.compile(r"([0-9]+)s")  # what the API server adds to the address: for how long it waits
READ_SHARE = 0.6  # of that, for what is read of the cluster


class Previewer:
    """Answers reviews."""

    def __init__(self, reader: Reader, settings: Settings) -> None:
        self._reader = reader
        self._settings = settings
        self._turns = Turns()

    async def answer(self, request: web.Request) -> web.Response:
        """400 for what is no AdmissionReview, 408 for one that does not arrive, 413 above LARGEST_REVIEW, 429 where too
        many are under way: the API server then goes on without a preview. Else 200, and allowed."""
        with self._turns.place(request.remote or "") as free:
            if free:
                return await self._answer(request)
        metrics.REVIEWS.labels("busy").inc()
        return web.json_response({"message": "too many reviews are under way"}, status=429)

    async def _answer(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        waits = WAITS.fullmatch(request.query.get("timeout", ""))
        seconds = min(int(waits[1]) if waits else 1, MOST_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                body = await request.read()
            review = review_of(json.loads(body))
        except TimeoutError:
            metrics.REVIEWS.labels("malformed").inc()
            return web.json_response({"message": f"no AdmissionReview within {seconds} s"}, status=408)
        except (ValueError, RecursionError, NotAReviewError) as error:
            metrics.REVIEWS.labels("malformed").inc()
            return web.json_response({"message": f"no AdmissionReview: {error}"}, status=400)
        outcome, warnings = await self._warnings(review, seconds=READ_SHARE * seconds)
        metrics.REVIEWS.labels(outcome).inc()
        metrics.REVIEW_SECONDS.observe(time.perf_counter() - started)
        return web.json_response(answer(review.uid, warnings))

    async def _warnings(self, review: Review, *, seconds: float) -> tuple[str, list[str]]:
        if not review.concerns_plans or review.after is None:
            return "nothing", []
        bodies = (review.after,) if review.before is None else (review.after, review.before)
        try:
            async with asyncio.timeout(seconds):
                after, *before = await self._reader.observe(*bodies)
        except (KubeError, TimeoutError) as error:
            logger.warning("no preview of %s: %s", review.after["metadata"]["name"], error)
            return "unread", ["No preview of the plan: the API server did not answer the webhook in time."]
        try:
            return "previewed", warning_lines(preview(after, before[0] if before else None, self._settings))
        except Exception:  # a preview that fails must fail alone
            logger.exception("no preview of %s/%s", after.namespace, after.name)
            return "failed", []


class ServedCertificate:
    """A TLS context whose certificate may change while it serves: connections made from then on see the new one."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def show(self, pair: Pair) -> None:
        """Serve with this pair; the files that the library wants it in are gone at once."""
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            key.touch(mode=0o600)
            certificate.write_bytes(pair.certificate)
            key.write_bytes(pair.key)
            self.context.load_cert_chain(certificate, key)


@asynccontextmanager
async def serve(previewer: Previewer, context: ssl.SSLContext, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the context ends; yields the port, a free one for `port` 0."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    application = web.Application(client_max_size=LARGEST_REVIEW)
    application.add_routes([web.post(PATH, previewer.answer), web.get("/healthz", healthz)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        bound = int(runner.addresses[0][1])
        logger.info("answering reviews on port %d", bound)
        yield bound
    finally:
        await runner.cleanup()
