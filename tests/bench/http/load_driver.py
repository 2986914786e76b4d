"""How much modelserve-bench itself takes, and what it adds to the times: load from an endpoint of a known pace.

    python tests/bench load_driver [--streams 32] [--tokens-per-s 170] [--output-tokens 1000]

A second process streams a token to every open answer at each step, as an engine does, and the bench measures it.
Prints the command's own table, then the pace that was set beside the one that was measured, and the driver's share of a
core; last the same as fast as the endpoint can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from modelserve_tools.bench.__main__ import main as bench

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(finish_reason: str | None = None) -> bytes:
    """As large as a real one."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    document = {"id": f"cmpl-{0:032x}", "object": "text_completion", "created": 1700000000, "model": "gemma-4-31b"}
    return chunk(b"data: " + json.dumps(document | {"choices": [choice], "usage": None}).encode() + b"\n\n")


class PacedEndpoint:
    """Every `step_s` all open answers get a token; None streams each as fast as its connection takes it."""

    def __init__(self, step_s: float | None) -> None:
        self._step_s = step_s
        self._stepped = asyncio.Event()

    async def run(self, started: Connection) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24)
        started.send(server.sockets[0].getsockname()[1])
        step = time.perf_counter()
        while True:
            step += self._step_s or 1.0
            await asyncio.sleep(max(0.0, step - time.perf_counter()))
            self._stepped.set()
            self._stepped = asyncio.Event()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(size[0].split(b":")[1])) if size else b""
                if body:
                    await self._answer(json.loads(body), writer)
                else:
                    models = {"data": [{"id": "paced"}]}
                    writer.write(HEAD % b"application/json" + chunk(json.dumps(models).encode()) + END)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % b"text/event-stream")
        count, token, last = body["max_tokens"], event(), event("length")
        for i in range(count):
            if self._step_s is not None:
                await self._stepped.wait()
            writer.write(token if i < count - 1 else last)
            await writer.drain()
            if self._step_s is None:
                await asyncio.sleep(0)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        document = json.dumps({"choices": [], "usage": usage}).encode()
        writer.write(chunk(b"data: " + document + b"\n\ndata: [DONE]\n\n") + END)


def serve(step_s: float | None, started: Connection) -> None:
    async def run() -> None:
        await PacedEndpoint(step_s).run(started)

    asyncio.run(run())


def measured(step_s: float | None, options: argparse.Namespace) -> dict[str, Any]:
    """The bench's figures of one load at this pace."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(step_s, theirs), daemon=True)
    process.start()
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "bench.json"
            code = bench([
                "--base-url", f"http://127.0.0.1:{ours.recv()}", "--concurrency", str(options.streams),
                "--num-requests", str(2 * options.streams), "--input-tokens", "64",
                "--output-tokens", str(options.output_tokens), "--json", str(path),
            ])  # fmt: skip
            assert code == 0
            figures: dict[str, Any] = json.loads(path.read_text())["loads"][0]
            return figures
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens-per-s", type=float, default=170.0, help="of each stream")
    parser.add_argument("--output-tokens", type=int, default=1000)
    options = parser.parse_args()
    paced = measured(1 / options.tokens_per_s, options)
    fast = measured(None, options)
    print(
        f"\nset:      {options.streams * options.tokens_per_s:8.0f} tok/s, "
        f"{1e3 / options.tokens_per_s:.2f} ms between tokens"
    )
    print(
        f"measured: {paced['output_tokens_per_s']:8.0f} tok/s, TPOT {paced['tpot_ms']['mean']:.2f} ms, "
        f"ITL p50 {paced['itl_ms']['p50']:.2f} p99 {paced['itl_ms']['p99']:.2f} ms, "
        f"driver {paced['driver_cpu_share']:.0%} of a core"
    )
    print(f"fastest:  {fast['output_tokens_per_s']:8.0f} tok/s, driver {fast['driver_cpu_share']:.0%} of a core")
