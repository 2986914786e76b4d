"""Images that a request names by address: fetched on the event loop, before the request is made into a prompt.

Bodies are made into prompts in threads, of which there are few; none of them waits for a host. What makes the prompt
says which addresses it wants (ImagesElsewhere), and is called again when their bytes are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from modelserve.sizing.media.image_input import ENCODED_BYTES, encoded_bytes
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher
from modelserve_worker.media.media_error import MediaError, MediaTooLarge
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import ImageSpan, RequestContext
from modelserve_worker.server.image_metrics import ImageMetrics
from modelserve_worker.server.state import ServedModel


class ImagesElsewhere(Exception):  # noqa: N818 - no fault: what a request still lacks
    """`places`: by address, each allowed, the part of the request that names it."""

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(f"{len(places)} images are to be fetched")
        self.places = places


async def fetch_images(
    wanted: ImagesElsewhere,
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Put what is wanted into `context.fetched`, fetched side by side; it is held until the request is answered. Raises
    ApiError for the first that fails, upon which the others are given up."""
    reader = model.images
    assert reader is not None, "nothing asks for images where there is no reader"
    assert reader.fetcher is not None, "no address is allowed where nothing is fetched"
    began = clock()
    room = _Room(encoded_bytes(reader.images.per_request), context)
    try:
        async with asyncio.TaskGroup() as group:
            for url, param in wanted.places.items():
                group.create_task(_fetch(url, param, reader.fetcher, room, model.image_metrics, context, clock))
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
        if isinstance(error, MediaError):
            if model.image_metrics is not None:
                model.image_metrics.refused(error)
            raise as_answer(error, "messages") from error
        raise error from failed
    finally:
        context.image_spans.append(ImageSpan("fetch", len(wanted.places), began, clock()))


async def _fetch(
    url: str,
    param: str,
    fetcher: ImageFetcher,
    room: _Room,
    metrics: ImageMetrics | None,
    context: RequestContext,
    clock: Callable[[], float],
) -> None:
    began = clock()
    try:
        context.fetched[url] = await fetcher.fetch(url, most_bytes=ENCODED_BYTES, hold=room.hold)
    except MediaError as error:
        error.param = error.param or param
        raise
    if metrics is not None:
        metrics.fetched(clock() - began)


class _Room:
    """For the bytes of one request's images, together."""

    def __init__(self, most_bytes: int, context: RequestContext) -> None:
        self._most_bytes = self._left = most_bytes
        self._account = context.account

    def hold(self, num_bytes: int) -> None:
        """Raises MediaTooLarge, and ApiError 429 where all requests together have too much."""
        if num_bytes > self._left:
            raise MediaTooLarge(
                f"the images of the request have more than {self._most_bytes} bytes together; send fewer or smaller"
            )
        self._account.hold_more(num_bytes)
        self._left -= num_bytes
