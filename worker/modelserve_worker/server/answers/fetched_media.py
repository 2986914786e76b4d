"""Images and sounds that a request names by address: fetched on the event loop, before it is made into a prompt.

Bodies are made into prompts in threads, of which there are few; none of them waits for a host. What makes the prompt
says which addresses it wants (MediaElsewhere), and is called again when their bytes are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from modelserve.sizing.media.audio_input import SOUND_BYTES, sent_bytes
from modelserve.sizing.media.image_input import ENCODED_BYTES, encoded_bytes
from modelserve_worker.media.fetching.image_fetcher import ImageFetcher
from modelserve_worker.media.media_error import MediaError, MediaTooLarge
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import MediaSpan, RequestContext
from modelserve_worker.server.media_metrics import MediaMetrics
from modelserve_worker.server.state import ServedModel


class Wanted(NamedTuple):
    """The part of a request that names an address, of an image or of a sound."""

    param: str
    sound: bool = False


class MediaElsewhere(Exception):  # noqa: N818 - no fault: what a request still lacks
    """`places`: by address, each allowed, what names it first."""

    def __init__(self, places: Mapping[str, Wanted]) -> None:
        super().__init__(f"{len(places)} are to be fetched")
        self.places = places


async def fetch_media(
    wanted: MediaElsewhere,
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Put what is wanted into `context.fetched`, fetched side by side; it is held until the request is answered. Raises
    ApiError for the first that fails, upon which the others are given up."""
    assert model.fetcher is not None, "no address is allowed where nothing is fetched"
    began = clock()
    images = 0 if model.images is None else encoded_bytes(model.images.images.per_request)
    room = _Room(images + (0 if model.audio is None else sent_bytes(model.audio.audio.per_request)), context)
    try:
        async with asyncio.TaskGroup() as group:
            for url, of in wanted.places.items():
                group.create_task(_fetch(url, of, model.fetcher, room, model, context, clock))
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
        if isinstance(error, MediaError):
            of = next((of for of in wanted.places.values() if of.param == error.param), Wanted(""))
            metrics = _metrics(model, of)
            if metrics is not None:
                metrics.refused(error)
            raise as_answer(error, "messages") from error
        raise error from failed
    finally:
        for kind, sound in (("images", False), ("sounds", True)):
            if count := sum(of.sound == sound for of in wanted.places.values()):
                context.media_spans.append(MediaSpan(f"{kind} fetch", count, began, clock()))


def _metrics(model: ServedModel, of: Wanted) -> MediaMetrics | None:
    return model.audio_metrics if of.sound else model.image_metrics


async def _fetch(
    url: str,
    of: Wanted,
    fetcher: ImageFetcher,
    room: _Room,
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float],
) -> None:
    began = clock()
    try:
        most = SOUND_BYTES if of.sound else ENCODED_BYTES
        context.fetched[url] = await fetcher.fetch(url, most_bytes=most, hold=room.hold)
    except MediaError as error:
        error.param = error.param or of.param
        raise
    metrics = _metrics(model, of)
    if metrics is not None:
        metrics.fetched(clock() - began)


class _Room:
    """For the bytes of one request's images and sounds, together."""

    def __init__(self, most_bytes: int, context: RequestContext) -> None:
        self._most_bytes = self._left = most_bytes
        self._account = context.account

    def hold(self, num_bytes: int) -> None:
        """Raises MediaTooLarge, and ApiError 429 where all requests together have too much."""
        if num_bytes > self._left:
            raise MediaTooLarge(
                f"images and sounds of the request have more than {self._most_bytes} bytes together; send fewer or "
                "smaller ones"
            )
        self._account.hold_more(num_bytes)
        self._left -= num_bytes
