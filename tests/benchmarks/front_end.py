"""Times what one token costs the front end: python tests/benchmarks/front_end.py --concurrency 32 --step-ms 6

The worker is the real one (uvicorn, admission, metrics, text, the engine's process behind its socket) with a stub for
the engine, which gives every open request one word a step. As many clients as `--concurrency` read one stream each.
Prints tokens per second, the longest pause in a stream, and last the microseconds of CPU that the front end's process
spent per token: other programs on the machine do not count, and 1,000,000 over it is the most tokens a second that one
core of front end can serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/models/gemma4-tiny-ple"
FOLDERS = ("operator", "worker", "tests/worker/engine")
READ_BYTES = 1 << 16


class Stream:
    """One client's answer: its events (fewer than tokens where steps came together), the longest time between reads."""

    def __init__(self) -> None:
        self.events = 0
        self.complete = False
        self.longest_pause_s = 0.0

    async def read(self, port: int, route: str, body: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        last_s = None
        while data := await reader.read(READ_BYTES):
            now = time.monotonic()
            if last_s is not None:
                self.longest_pause_s = max(self.longest_pause_s, now - last_s)
            last_s = now
            self.events += data.count(b"data: {")
            self.complete = self.complete or b"data: [DONE]" in data
        writer.close()


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _ready(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return
            await asyncio.sleep(0.1)


async def _post_long_bodies(port: int, count: int) -> None:
    """One after the other; each is longer than the stub's context and refused once it has been read and checked."""
    body = {"model": MODEL.name, "prompt": [100_000 + i for i in range(131_072)], "max_tokens": 1}
    data = json.dumps(body).encode()
    for _ in range(count):
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await Stream().read(port, "/v1/completions", data)
        print(f"a body of {len(data)} bytes was answered after {1e3 * (time.monotonic() - began):.0f} ms")


async def _measure(pid: int, port: int, args: argparse.Namespace) -> None:
    await _ready(port)
    body = {"model": MODEL.name, "stream": True, "ignore_eos": True, "max_tokens": args.tokens}
    if args.route == "chat":
        body["messages"] = [{"role": "user", "content": "go on"}]
    else:
        body["prompt"] = [2, 3]
    path = "/v1/chat/completions" if args.route == "chat" else "/v1/completions"
    await Stream().read(
        port, path, json.dumps(body | {"max_tokens": 50}).encode()
    )  # the first one imports and warms up
    streams = [Stream() for _ in range(args.concurrency)]
    cpu_s, began = _cpu_seconds(pid), time.monotonic()
    long_bodies = asyncio.create_task(_post_long_bodies(port, args.long_bodies))
    await asyncio.gather(*(stream.read(port, path, json.dumps(body).encode()) for stream in streams))
    await long_bodies
    cpu_s, wall_s = _cpu_seconds(pid) - cpu_s, time.monotonic() - began
    tokens = args.concurrency * args.tokens
    events = sum(stream.events for stream in streams)
    assert all(stream.complete for stream in streams), "a stream ended without its [DONE]"
    print(f"{tokens} tokens, {events} events, {wall_s:.2f} s: {tokens / wall_s:.0f} tokens/s")
    print(f"longest pause in a stream: {1e3 * max(stream.longest_pause_s for stream in streams):.0f} ms")
    print(f"front end, microseconds of CPU per token: {1e6 * cpu_s / tokens:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=6.0, help="how long a step of the stub takes")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of an answer")
    parser.add_argument("--route", choices=["chat", "completions"], default="completions")
    parser.add_argument("--long-bodies", type=int, default=0, help="bodies of 131,072 token ids to read meanwhile")
    parser.add_argument("--port", type=int, default=18471)
    args = parser.parse_args()
    settings = json.dumps({"step_seconds": args.step_ms / 1e3})
    worker = subprocess.Popen(
        [
            sys.executable, str(ROOT / "tests/worker/server/stub_worker.py"), settings, os.devnull, "serve",
            "--model", str(MODEL), "--host", "127.0.0.1", "--port", str(args.port),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        asyncio.run(_measure(worker.pid, args.port, args))
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main()
