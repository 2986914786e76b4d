"""An OpenAI-compatible endpoint that streams what a test's script sends, over plain asyncio streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any


def completion_event(text: str = " word", finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}


def usage_event(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def encoded(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


DONE = b"data: [DONE]\n\n"


class Reply:
    """One answer on its way; every `send` is an HTTP chunk of its own."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def head(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        lines = (f"HTTP/1.1 {status} Status", f"content-type: {content_type}", "transfer-encoding: chunked")
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def document(self, document: Any, status: int = 200) -> None:
        await self.head(status, "application/json")
        await self.send(json.dumps(document).encode())
        await self.end()

    async def cut(self) -> None:
        """Close the connection in the middle of the answer."""
        self._writer.close()


Script = Callable[[dict[str, Any], Reply], Awaitable[None]]


def prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def as_asked(body: dict[str, Any], reply: Reply, *, tokens: int | None = None) -> None:
    """max_tokens tokens, or `tokens`; an event each."""
    count = body["max_tokens"] if tokens is None else tokens
    await reply.head()
    for i in range(count):
        await reply.send(encoded(completion_event(finish_reason="length" if i == count - 1 else None)))
    await reply.send(encoded(usage_event(prompt_tokens(body), count)) + DONE)
    await reply.end()


class StreamingEndpoint:
    """Answers completions of both kinds with `script`. Keeps the bodies and how many were open at a time."""

    def __init__(
        self,
        script: Script = as_asked,
        *,
        models: Sequence[str] = ("stub",),
        max_model_len: int | None = 4096,
        routes: Sequence[str] = ("/v1/completions", "/v1/chat/completions"),
    ) -> None:
        self._script = script
        self._routes = routes
        self._models = {"object": "list", "data": [{"id": name, "max_model_len": max_model_len} for name in models]}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """On the running loop; gives the server's address, without /v1."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    @contextmanager
    def listening(self) -> Iterator[str]:
        """On a loop in a thread of its own; gives the server's address, without /v1."""
        started = threading.Event()
        address: list[str] = []
        stop = asyncio.Event()
        loop = asyncio.new_event_loop()

        async def serve() -> None:
            async with self.serving() as url:
                address.append(url)
                started.set()
                await stop.wait()
            # Connections that are still open end with their tasks.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        thread = threading.Thread(target=lambda: asyncio.Runner(loop_factory=lambda: loop).run(serve()))
        thread.start()
        started.wait()
        try:
            yield address[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._request(reader, Reply(writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, reply: Reply) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(f"{method} {path}")
        self.keys.append(headers.get("authorization"))
        if path == "/v1/models":
            await reply.document(self._models)
        elif path == "/version":
            await reply.document({"version": "1.2.3"})
        elif path in self._routes:
            await self._answer(json.loads(data), reply)
        else:
            await reply.document({"error": {"message": "no such route"}}, status=404)

    async def _answer(self, body: dict[str, Any], reply: Reply) -> None:
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._script(body, reply)
        finally:
            self.open -= 1
