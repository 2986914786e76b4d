"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from modelserve_worker.server.http.chunk_writer import ChunkWriter
from modelserve_worker.server.http.request_context import CLIENT_LEFT, RequestContext
from modelserve_worker.server.json_text import to_json

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass every event on at once
]


class ClientDisconnectError(Exception):
    """Nobody waits for the answer any more."""


def event(document: Any) -> bytes:
    return b"data: " + to_json(document) + b"\n\n"


def named_event(name: str, document: Any) -> bytes:
    """An event with its kind in front, for clients that read it there."""
    return b"event: " + name.encode() + b"\n" + event(document)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects. The body must have been read.

    Raises ClientDisconnectError.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectError
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse:
    """An ASGI response that sends `events` (encoded) as they come, and `end` behind the last, and closes the generator
    however it ends.

    The response starts with the first event: what fails before it is raised and can still be answered with its status.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], end: bytes) -> None:
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send(send, ChunkWriter.of(scope)))
        except ClientDisconnectError:
            RequestContext.of(scope).broken = CLIENT_LEFT

    async def _send(self, send: Send, chunks: ChunkWriter | None) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for said in events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                if chunks is None:
                    await send({"type": "http.response.body", "body": said, "more_body": True})
                else:
                    await chunks.send(said)
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": self._end, "more_body": False})
