"""Pieces of streams go past middleware and h11, and clients see what these would have sent."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from modelserve_worker.server.http.chunk_writer import ChunkWriter

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "naïve ☃ text", "max_tokens": 40},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "naïve ☃ text"}], "max_tokens": 40},
    "/v1/responses": {"input": "naïve ☃ text", "max_output_tokens": 40},
    "/v1/messages": {"messages": [{"role": "user", "content": "naïve ☃ text"}], "max_tokens": 40},
}


def _request(path: str, body: dict[str, Any], *, version: str, close: bool = False) -> bytes:
    data = json.dumps({"model": "tiny", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}{'Connection: close' if close else 'X: y'}\r\n\r\n".encode() + data


def _received(server: Any, sent: bytes) -> bytes:
    """All of it, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def _chunks(data: bytes) -> tuple[list[bytes], bytes]:
    """The chunks of a body, read as RFC 9112 has them and no other way, and what follows it."""
    chunks = []
    while True:
        size, _, data = data.partition(b"\r\n")
        assert size, data
        assert set(size) <= set(b"0123456789abcdef"), size
        length = int(size, 16)
        chunk, end, data = data[:length], data[length : length + 2], data[length + 2 :]
        assert (len(chunk), end) == (length, b"\r\n")
        if not length:
            return chunks, data
        chunks.append(chunk)


def _without_ids(body: bytes) -> list[Any]:
    """Events, less what differs from answer to answer."""
    told = []
    for line in body.decode().split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            told.append(sorted(event))
            told += [event.get("delta"), [choice | {"id": 0} for choice in event.get("choices", ())]]
        else:
            told.append(line)
    return told


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_is_a_chunked_body_and_its_connection_goes_on(server: Any, path: str) -> None:
    server.says("naïve ☃ text, and more of it")
    first = _request(path, ROUTES[path], version="1.1")
    received = _received(server, first + _request(path, ROUTES[path], version="1.1", close=True))
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    chunks, rest = _chunks(rest)
    second, _, rest = rest.partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0], second.split(b"\r\n")[0]) == (b"HTTP/1.1 200 OK",) * 2
    assert b"x-request-id" in second.lower(), "middleware sees the head of each"
    again, rest = _chunks(rest)
    assert rest == b""
    assert len(chunks) == len(again) > 10, "an event goes out as it comes"
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)
    assert _without_ids(b"".join(chunks)) == _without_ids(b"".join(again))
    old = _received(server, _request(path, ROUTES[path], version="1.0"))
    head, _, body = old.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert _without_ids(body) == _without_ids(b"".join(chunks)), "a client of HTTP/1.0 gets the same without chunks"


@pytest.mark.parametrize("path", ROUTES)
async def test_without_such_a_connection_the_server_gets_the_pieces(server: Any, path: str) -> None:
    server.says("naïve ☃ text, and more of it")
    body = {"model": "tiny", "stream": True, **ROUTES[path]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://x") as client:
        inside = (await client.post(path, json=body)).content
    outside = await asyncio.to_thread(httpx.post, server.url + path, json=body, timeout=60)
    assert _without_ids(inside) == _without_ids(outside.content)


class _Connection:
    """As much of uvicorn's as a writer reads."""

    def __init__(self, **scope: str) -> None:
        self.written: list[bytes] = []
        self.transport = SimpleNamespace(write=self.written.append)
        self.flow = FlowControl(self.transport)  # type: ignore[arg-type]
        self.cycle = SimpleNamespace(disconnected=False)
        self.scope: dict[str, Any] = {"http_version": "1.1", "method": "POST", **scope}

    def writer(self) -> ChunkWriter:
        ChunkWriter.offer(self)  # type: ignore[arg-type]
        writer = ChunkWriter.of(self.scope)
        assert writer is not None
        return writer


async def test_a_piece_waits_while_the_client_does_not_read() -> None:
    connection = _Connection()
    writer = connection.writer()
    await writer.send(b"a" * 17)
    assert connection.written == [b"11\r\n" + b"a" * 17 + b"\r\n"]
    connection.flow.pause_writing()
    sending = asyncio.create_task(writer.send(b"b"))
    await asyncio.sleep(0)
    assert (sending.done(), len(connection.written)) == (False, 1)
    connection.flow.resume_writing()
    await sending
    assert connection.written[1:] == [b"1\r\nb\r\n"]


async def test_nothing_goes_to_a_client_that_has_left() -> None:
    connection = _Connection()
    writer = connection.writer()
    connection.flow.pause_writing()
    sending = asyncio.create_task(writer.send(b"b"))
    await asyncio.sleep(0)
    connection.cycle.disconnected = True
    connection.flow.resume_writing()
    await sending
    connection.flow.pause_writing()
    await writer.send(b"c")
    assert connection.written == []


async def test_a_piece_of_no_bytes_does_not_end_the_body() -> None:
    connection = _Connection()
    await connection.writer().send(b"")
    assert connection.written == []


@pytest.mark.parametrize("scope", [{"http_version": "1.0"}, {"method": "HEAD"}])
def test_no_chunks_are_offered_to_who_cannot_read_them(scope: dict[str, str]) -> None:
    connection = _Connection(**scope)
    ChunkWriter.offer(connection)  # type: ignore[arg-type]
    assert ChunkWriter.of(connection.scope) is None
