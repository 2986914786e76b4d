"""run_server: signals while loading and while serving, the drain limit, an engine that dies, a start that fails."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.app import create_app
from modelserve_worker.server.lifecycle import EngineStopped, bind, run_server
from modelserve_worker.server.state import ServedModel, ServerState

ENDLESS = {"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}


class _Running:
    """run_server as a task, with its base address."""

    def __init__(self, served_model: ServedModel, *, engine: Any = None, drain_seconds: float = 5.0) -> None:
        self.state = ServerState(served_model)
        self.engine = engine
        self.failure: Exception | None = None
        self.go = asyncio.Event()
        self.ready = asyncio.Event()
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.state, WorkerMetrics("tiny"))
        self.task = asyncio.create_task(
            run_server(
                app,
                self.state,
                listener,
                shutdown_delay_seconds=0.0,
                drain_seconds=drain_seconds,
                starting=self._start(),
                stop_engine=self._stop_engine,
            )
        )

    async def _stop_engine(self, reason: str) -> None:
        if self.engine is not None:
            self.engine.dead = reason

    async def _start(self) -> None:
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.state.mark_ready(self.engine)
        self.ready.set()


async def test_a_signal_while_loading_ends_the_server_at_once(served_model: ServedModel) -> None:
    running = _Running(served_model)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{running.url}/ready")).status_code == 503
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(running.task, 60)
    assert running.state.engine is None


async def test_a_failed_start_is_raised(served_model: ServedModel) -> None:
    running = _Running(served_model)
    running.failure = InvalidInput("broken weights")
    running.go.set()
    with pytest.raises(InvalidInput, match="broken weights"):
        await asyncio.wait_for(running.task, 60)


async def test_open_requests_end_with_the_drain_time(served_model: ServedModel, echo_engine: Any) -> None:
    echo_engine.step_seconds = 0.1
    running = _Running(served_model, engine=echo_engine, drain_seconds=0.5)
    running.go.set()
    await running.ready.wait()
    async with (
        httpx.AsyncClient(base_url=running.url) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
    ):
        signal.raise_signal(signal.SIGTERM)
        events = (await stream.aread()).decode().split("\n\n")
    await asyncio.wait_for(running.task, 60)
    error = json.loads(events[-3].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    assert "the answer was not complete 0.5 s later (rollout.drainSeconds); ask again" in error["message"]
    assert (events[-2], echo_engine.running) == ("data: [DONE]", set())


async def test_a_dead_engine_ends_the_server(served_model: ServedModel, echo_engine: Any) -> None:
    running = _Running(served_model, engine=echo_engine)
    running.go.set()
    await running.ready.wait()
    echo_engine.dead = "the device is gone"
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(running.task, 60)


async def test_an_address_in_use_is_explained() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(OSError, match="choose another --host or --port"):
        bind("127.0.0.1", taken.getsockname()[1])
