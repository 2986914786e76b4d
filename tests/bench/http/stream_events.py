"""Times what one event of a stream costs the front end beside system calls.

    python tests/bench stream_events

The parts are the real ones, from the engine's message to the bytes for the socket (EngineProcess, the application,
uvicorn's protocol), in this process; sockets, clients and the engine are not there, so other programs on the machine
disturb little. Every step gives each of `--streams` requests `--tokens` words, and `--steps-at-once` steps come before
anybody is woken, as for a front end that is behind. Prints microseconds of CPU per token, of the best of five rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import uvicorn
from uvicorn.server import ServerState as UvicornState

from modelserve_worker.engine import process
from modelserve_worker.engine.wire import FrameReader, StepReport, encode
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import Request, RequestOutput
from modelserve_worker.scheduling.stats import EngineStats, StepEvents
from modelserve_worker.server.app import create_app
from modelserve_worker.server.draining import CloseWhileDraining
from modelserve_worker.server.http.connections import Connection, Connections
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

MODEL = Path(__file__).resolve().parents[3] / "tests/models/gemma4-tiny-ple"
FIRST_WORD, WORDS = 600, 100  # of the model's vocabulary
MESSAGES = [{"role": "user", "content": "go on"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [2, 3], "max_tokens": 60_000, "ignore_eos": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60_000, "ignore_eos": True}),
    "responses": ("/v1/responses", {"input": "go on", "max_output_tokens": 60_000}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60_000}),
}


class Wire(asyncio.Transport):
    """Takes what is written, and keeps no byte of it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes = 0

    def write(self, data: Any) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ToEngine(Wire):
    """Keeps the requests that the front end sends."""

    def __init__(self) -> None:
        super().__init__()
        self.request_ids: list[str] = []

    def write(self, data: Any) -> None:
        self.request_ids += [each.request_id for each in FrameReader().feed(data) if isinstance(each, Request)]


async def _opened(engine: process.EngineProcess, route: str, count: int) -> list[tuple[Connection, Wire]]:
    """Connections with their wires, on each of which one stream is asked for."""
    state, metrics = ServerState(ServedModel("m", load_checkpoint_text(MODEL), vocab_size=8192)), WorkerMetrics("m")
    state.mark_ready(engine)
    app = CloseWhileDraining(create_app(state, metrics, ServerSettings(access_log="off")), state)
    connection = functools.partial(Connection, Connections(count, header_s=60, discard_s=60, write_s=60))
    config = uvicorn.Config(app, http=connection, ws="none", lifespan="off", log_config=None, access_log=False)  # type: ignore[arg-type]
    config.load()
    path, body = BODIES[route]
    data = json.dumps({"model": "m", "stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    opened = [(connection(config, UvicornState(), {}), Wire()) for _ in range(count)]
    for one, wire in opened:
        one.connection_made(wire)
        one.data_received(head.encode() + data)
    return opened


def _message(request_ids: list[str], step: int, tokens: int) -> bytes:
    words = [tuple(FIRST_WORD + (step * tokens + i) % WORDS for i in range(tokens))] * len(request_ids)
    outputs = map(RequestOutput, request_ids, words)
    admitted = [(name, time.monotonic(), 0) for name in request_ids] if step == 0 else []
    return encode(StepReport.of(step, EngineStats(), outputs, [], StepEvents(admitted, [len(request_ids)])))


async def _measure(args: argparse.Namespace) -> None:
    with mock.patch.object(process.multiprocessing, "get_context"):
        engine = process.EngineProcess(mock.Mock(), process.FairLimits(args.streams, 1 << 20, args.streams))
    engine.max_model_len, to_engine = 100_000, ToEngine()
    engine.connection_made(to_engine)
    opened = await _opened(engine, args.route, args.streams)
    while len(to_engine.request_ids) < args.streams:  # noqa: ASYNC110 - bodies are read in threads
        await asyncio.sleep(0.01)
    engine.data_received(_message(to_engine.request_ids, 0, args.tokens))
    await asyncio.sleep(0.1)
    best, per_round = float("inf"), args.steps * args.streams * args.tokens
    before = sum(wire.writes for _, wire in opened)
    for _ in range(5):
        messages = [_message(to_engine.request_ids, step, args.tokens) for step in range(1, args.steps + 1)]
        began = time.thread_time()
        for first in range(0, args.steps, args.steps_at_once):
            for message in messages[first : first + args.steps_at_once]:
                engine.data_received(message)
            for _ in range(4):  # turns of the loop, in which whoever was woken runs to its next wait
                await asyncio.sleep(0)
        best = min(best, time.thread_time() - began)
    events = (sum(wire.writes for _, wire in opened) - before) / 5
    print(f"{args.route}: {1e6 * best / per_round:.2f} us of CPU per token, {per_round / events:.2f} tokens an event")
    for connection, _ in opened:
        connection.connection_lost(None)
    await asyncio.sleep(0.1)  # for their requests to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", choices=BODIES, default="completions")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300, help="of one round")
    parser.add_argument("--steps-at-once", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="that a step gives each stream")
    args = parser.parse_args()
    asyncio.run(_measure(args))
