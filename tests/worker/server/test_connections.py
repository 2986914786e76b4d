"""Connections that send nothing, or half of something, hurt nobody: not /health, not running streams, not the end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.app import create_app
from modelserve_worker.server.http.bounded_log import BoundedLog
from modelserve_worker.server.http.connections import Connections, most_connections
from modelserve_worker.server.lifecycle import bind, run_server
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
ENDLESS = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}


class _Server:
    """run_server over an engine that is ready."""

    def __init__(self, served_model: ServedModel, engine: Any, settings: ServerSettings) -> None:
        self.state = ServerState(served_model)
        self._engine = engine
        listener = bind("127.0.0.1", 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # the kernel would hold megabytes of an answer
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.task = asyncio.create_task(
            run_server(
                create_app(self.state, WorkerMetrics("tiny"), settings), self.state, listener, drain_seconds=3600,
                shutdown_delay_seconds=0, starting=self._start(), stop_engine=self._stop, settings=settings,
            )
        )  # fmt: skip

    async def _start(self) -> None:
        self.state.mark_ready(self._engine)

    async def _stop(self, reason: str) -> None:
        self._engine.dead = "the engine was shut down"

    async def connect(self, data: bytes = b"") -> socket.socket:
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", self.port))
        await loop.sock_sendall(connection, data)
        return connection

    async def stop(self) -> None:
        if not self.task.done():
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(self.task, 60)


@pytest.fixture
async def running(served_model: ServedModel, echo_engine: Any, settings: ServerSettings) -> AsyncIterator[_Server]:
    server = _Server(served_model, echo_engine, settings)
    async with httpx.AsyncClient() as client:
        while (await client.get(f"{server.url}/ready")).status_code != 200:
            pass
    yield server
    await server.stop()


@pytest.mark.parametrize("settings", [ServerSettings(max_connections=40)])
async def test_half_open_sockets_make_room(
    running: _Server, echo_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Five times as many as there is room for; the stream that was there before them goes on to its end."""
    echo_engine.step_seconds = 0.005
    caplog.set_level(logging.INFO)
    with ExitStack() as sockets:
        async with (
            httpx.AsyncClient(base_url=running.url) as client,
            client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            for _ in range(200):
                sockets.enter_context(await running.connect(b"POST /v1/completions HTTP/1.1\r\nHost:"))
            async with httpx.AsyncClient(base_url=running.url) as other:
                assert (await other.get("/health")).status_code == 200
            assert "[DONE]" in [line async for line in lines if line][-1]
    assert len(caplog.records) < 100


@pytest.mark.parametrize("settings", [ServerSettings(max_connections=1)])
async def test_where_all_are_answered_a_new_one_is_turned_away(running: _Server, echo_engine: Any) -> None:
    echo_engine.step_seconds = 0.005
    async with (
        httpx.AsyncClient(base_url=running.url) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        async with httpx.AsyncClient(base_url=running.url) as other:
            refused = await other.get("/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert refused.headers["retry-after"] == "2"
        assert "[DONE]" in [line async for line in lines if line][-1]


@pytest.mark.parametrize("settings", [ServerSettings(header_seconds=0.5, body_gap_seconds=0.5)])
@pytest.mark.parametrize("sent", [b"", b"GET /health HT", HEAD.replace(b"900", b"99999999")])
async def test_a_request_that_does_not_arrive_is_not_waited_for(running: _Server, sent: bytes) -> None:
    with await running.connect(sent) as connection:
        loop = asyncio.get_running_loop()
        while await asyncio.wait_for(loop.sock_recv(connection, 4096), 60):
            pass  # an answer to a body that is too long, where there was a head; then the end
    async with httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(1.0)
        assert (await client.get("/health")).status_code == 200, "a kept connection may be idle for longer"


@pytest.mark.parametrize("settings", [ServerSettings()])
async def test_the_end_does_not_wait_for_half_of_a_body(running: _Server, echo_engine: Any) -> None:
    """And a stream that was running is told to its end."""
    echo_engine.step_seconds = 0.005
    with await running.connect(HEAD + b'{"model":') as half, await running.connect(b"GET /he"), await running.connect():
        async with (
            httpx.AsyncClient(base_url=running.url) as client,
            client.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 100}) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            signal.raise_signal(signal.SIGTERM)
            assert "[DONE]" in [line async for line in lines if line][-1]
        await asyncio.wait_for(running.task, 60)  # and not the time that is given to open requests
        answer = await asyncio.get_running_loop().sock_recv(half, 4096)
        assert answer.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("settings", [ServerSettings(write_seconds=0.3)])
async def test_a_client_that_reads_nothing_is_given_up(running: _Server, echo_engine: Any) -> None:
    """And one that reads slowly is not; neither holds up the other."""
    echo_engine.step_seconds = 0.002
    body = json.dumps(ENDLESS | {"n": 16, "logprobs": 20}).encode()
    head = HEAD.replace(b"900", str(len(body)).encode())
    loop = asyncio.get_running_loop()
    with socket.socket() as silent:
        silent.setblocking(False)
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(silent, ("127.0.0.1", running.port))
        await loop.sock_sendall(silent, head + body)
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
        ):
            assert "[DONE]" in [line async for line in stream.aiter_lines() if line][-1]
        async with asyncio.timeout(60):
            while echo_engine.running:  # noqa: ASYNC110 - the engine's, in the server
                await asyncio.sleep(0.02)
    assert len(echo_engine.aborted) == 16


def test_the_limit_stays_below_that_of_open_files() -> None:
    assert most_connections(1024) == 1024 - 224
    assert most_connections(10) == 1
    assert Connections(5, header_s=1, discard_s=1, write_s=1).limit == 5


def test_a_message_is_logged_a_few_times_a_minute() -> None:
    bound = BoundedLog(per_minute=3, clock=lambda: now)

    def passes(message: str) -> str | None:
        record = logging.LogRecord("a", logging.INFO, "", 0, message, (), None)
        return record.getMessage() if bound.filter(record) else None

    now = 100.0
    assert [passes("x") for _ in range(9)] == ["x"] * 3 + [None] * 6
    assert passes("y") == "y", "others are not kept back"
    now = 161.0
    assert passes("x") == "x (and 6 more since the last one)"
