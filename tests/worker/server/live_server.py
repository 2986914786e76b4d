"""A real server on a loopback port, with an engine that answers with the prompt's own tokens."""

from __future__ import annotations

import asyncio
import functools
import math
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from modelserve_worker.engine_client import EngineDead
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput, TokenLogprobs
from modelserve_worker.scheduling.stats import EngineStats
from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.app import create_app
from modelserve_worker.server.http.connections import Connection, Connections
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServerState

EOS = 106
ENDS = (EOS, 50)  # the end of a turn, and the start of a tool's response


class EchoEngine:
    """Says `reply`, or the prompt's byte tokens again and EOS. One token per step of `step_seconds`."""

    def __init__(self, max_model_len: int = 512) -> None:
        self.max_model_len = max_model_len
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.steps: dict[str, int] = {}
        self.aborted: list[str] = []  # by closing the iterator they were in
        self.ended: list[str] = []  # by `abort`
        self.clients: list[str] = []
        self.refusal: Exception | None = None
        self.dead: str | None = None
        self.fail_after: int | None = None
        self.at_fault: str | None = None  # the field of the request for which it fails
        self.step_seconds = 0.0
        self.reply: list[int] | None = None
        self.cached_tokens = 0  # of each prompt

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        if self.dead:
            raise EngineDead(self.dead)
        if self.refusal is not None:
            raise self.refusal
        self.clients.append(client)
        open_requests = {request.request_id: request for request in requests}
        self.requests += requests
        self.running |= open_requests.keys()
        try:
            position = 0
            while open_requests:
                await self._step()
                if self.dead:
                    raise EngineDead(self.dead)
                outputs = [self._output(request, position) for request in open_requests.values()]
                position += 1
                for output in outputs:
                    if output.finish_reason is not None:
                        del open_requests[output.request_id]
                        self.running.discard(output.request_id)
                yield outputs
        finally:
            self.running -= open_requests.keys()
            self.aborted += open_requests

    async def _step(self) -> None:
        """As long as a step takes, or until the engine dies in the middle of one."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.step_seconds
        await asyncio.sleep(min(self.step_seconds, 0.05))
        while not self.dead and loop.time() < ends:  # noqa: ASYNC110 - a test sets it, in another thread
            await asyncio.sleep(min(ends - loop.time(), 0.05))

    def _output(self, request: Request, position: int) -> RequestOutput:
        name, sampling = request.request_id, request.sampling
        if name in self.ended:
            return RequestOutput(name, (), FinishReason.ABORT)
        if self.fail_after is not None and position >= self.fail_after:
            error = (
                "the step failed: overheated" if self.at_fault is None else "the answer's grammar exceeds its bounds"
            )
            return RequestOutput(name, (), FinishReason.ERROR, error=error, error_field=self.at_fault)
        self.steps[name] = position + 1
        echo = [token_id for token_id in request.prompt_token_ids if token_id >= 238] + [EOS]
        reply = echo if self.reply is None else self.reply
        token_id = reply[min(position, len(reply) - 1)]
        ends = token_id in ENDS and not sampling.ignore_eos
        last = position + 1 == sampling.max_tokens
        return RequestOutput(
            name,
            (token_id,),
            FinishReason.STOP if ends else FinishReason.LENGTH if last else None,
            stop_token_id=token_id if ends else None,
            logprobs=self._logprobs(token_id, sampling.logprobs),
            admitted_s=request.arrival_s if self.cached_tokens and not position else None,
            cached_tokens=0 if position else self.cached_tokens,
        )

    @staticmethod
    def _logprobs(token_id: int, count: int | None) -> tuple[TokenLogprobs, ...]:
        if count is None:
            return ()
        top = [(token_id, math.log(0.5)), *((i, math.log(0.1)) for i in range(300, 300 + count))][:count]
        return (TokenLogprobs(math.log(0.5), 1, tuple(top)),)

    def abort(self, request_id: str) -> None:
        self.ended.append(request_id)

    def is_alive(self) -> bool:
        return self.dead is None

    def plan_report(self) -> dict[str, Any]:
        return {"maxModelLen": self.max_model_len}

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running), num_waiting=3, global_pages_used=5, global_pages_total=10,
            sliding_pages_used=7, sliding_pages_total=20, pool_bytes=1000, held_bytes=250,
            prompt_tokens_total=11, generation_tokens_total=12, preemptions_total=2,
        )  # fmt: skip


class LiveServer:
    """What a test sees of a running server."""

    def __init__(
        self, app: Starlette, state: ServerState, engine: EchoEngine, metrics: WorkerMetrics, port: int
    ) -> None:
        self.app = app
        self.state = state
        self.engine = engine
        self.metrics = metrics
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def says(self, text: str) -> int:
        """Script the engine; the number of tokens."""
        self.engine.reply = list(self.state.model.text.encoder.encode(text, add_special_tokens=False, most_tokens=4096))
        return len(self.engine.reply)

    @staticmethod
    def eventually(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Wait for the server: an answer has gone out before it gives back what the request held."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.005)

    def prompt(self) -> str:
        """What the engine was asked last, markers included."""
        ids = self.engine.requests[-1].prompt_token_ids
        return str(self.state.model.text.tokenizer.decode(ids, skip_special_tokens=False))


@contextmanager
def serve(
    state: ServerState,
    engine: EchoEngine,
    settings: ServerSettings | None = None,
    *,
    adapters: AdapterService | None = None,
) -> Iterator[LiveServer]:
    metrics = WorkerMetrics(state.model.name)
    metrics.observe_engine(engine.stats, cache_config={"block_size": "64", "num_gpu_blocks": "10"})
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(state, metrics, settings, adapters=adapters)
    connection = functools.partial(Connection, Connections(1000, header_s=20, discard_s=20, write_s=120))
    config = uvicorn.Config(app, http=connection, log_level="warning", lifespan="off")  # type: ignore[arg-type]
    server = uvicorn.Server(config)

    async def run() -> None:
        if adapters is not None:
            adapters.start(engine)  # type: ignore[arg-type]
        state.mark_ready(engine)  # type: ignore[arg-type]
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    if adapters is not None:
        thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield LiveServer(app, state, engine, metrics, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()
    assert not thread.is_alive()
