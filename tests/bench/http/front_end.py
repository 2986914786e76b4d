"""Times what one token costs the front end.

    python tests/bench front_end --concurrency 32 --step-ms 6

The worker is the real one (uvicorn, admission, metrics, text, the engine's process behind its socket) with a stub for
the engine, which gives every open request one word a step. As many clients as `--concurrency` read one stream each.
Prints tokens per second, the longest pause in a stream, and last the microseconds of CPU that the front end's process
spent per token: other programs on the machine do not count, and 1,000,000 over it is the most tokens a second that one
core of front end can serve.

With --prompt-tokens N it times prompts instead: one request after the other, each with N other token ids, in a body as
modelserve-bench sends it, to an engine whose step takes no time. Prints the milliseconds of CPU of what becomes of a
body (these parts run in this process), then from the first byte sent to the first event, and last the front end's CPU
per prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelserve_worker.engine.wire import FrameReader, encode
from modelserve_worker.server.answers.completions import CompletionAnswer
from modelserve_worker.server.bodies.field_policy import FieldPolicy
from modelserve_worker.server.bodies.protocol import CompletionRequest
from modelserve_worker.server.json_text import read_json, structure_excess
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests/models/gemma4-tiny-ple"
FOLDERS = ("operator", "worker", "tests/worker/engine")
READ_BYTES = 1 << 16
VOCABULARY = 262_144  # of the published models: most ids have six digits
LONGEST = 131_072
WARM_UP = 20  # prompts before the clock starts


class Stream:
    """One client's answer: its events (fewer than tokens where steps came together), the longest time between reads."""

    def __init__(self) -> None:
        self.events = 0
        self.complete = False
        self.longest_pause_s = 0.0
        self.first_event_s = 0.0  # on time.monotonic()

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
            if self.events and not self.first_event_s:
                self.first_event_s = now
            self.complete = self.complete or b"data: [DONE]" in data
        writer.close()


def _cpu_seconds(pid: int) -> float:
    """Time that a process and its threads had a core, in seconds."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


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


def _prompt_body(model: str, tokens: int, number: int) -> bytes:
    ids = random.Random(number).choices(range(2, VOCABULARY), k=tokens)
    settings = {"model": model, "max_tokens": 2, "temperature": 0.0, "stream": True, "ignore_eos": True}
    return json.dumps(settings | {"prompt": ids, "min_tokens": 2}, separators=(",", ":")).encode()


def _time_parts(model: Path, args: argparse.Namespace) -> None:
    """What the front end and the engine's process do with a body's bytes, part by part."""
    served = ServedModel(model.name, load_checkpoint_text(model), vocab_size=VOCABULARY)
    times: dict[str, list[float]] = defaultdict(list)

    def timed(part: str, work: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
        began = time.thread_time()
        result = work(*inputs, **settings)
        times[part].append(time.thread_time() - began)
        return result

    for number in range(WARM_UP + args.prompts):
        if number == WARM_UP:
            times.clear()
        data = _prompt_body(model.name, args.prompt_tokens, number)
        timed("count structure", structure_excess, data)
        document = timed("read JSON", read_json, data)
        body = timed("validate", CompletionRequest.model_validate, document, context=FieldPolicy())
        answer = timed("make the request", CompletionAnswer, body, served, max_model_len=LONGEST)
        frame = timed("write the message", encode, answer.specs[0].request)
        timed("read the message", FrameReader().feed, frame)
    for part, seconds in times.items():
        print(f"{part:18} median {1e3 * statistics.median(seconds):6.3f} ms of CPU")
    print(f"{'together':18} median {1e3 * sum(map(statistics.median, times.values())):6.3f} ms of CPU")


async def _measure_prompts(pid: int, port: int, model: Path, args: argparse.Namespace) -> None:
    await _ready(port)
    waits = []
    for number in range(WARM_UP + args.prompts):
        if number == WARM_UP:
            cpu_s = _cpu_seconds(pid)
        body, stream = _prompt_body(model.name, args.prompt_tokens, number), Stream()
        began = time.monotonic()
        await stream.read(port, "/v1/completions", body)
        assert stream.complete, "a stream ended without its [DONE]"
        waits.append(stream.first_event_s - began)
    cpu_s = _cpu_seconds(pid) - cpu_s
    waits = sorted(waits[WARM_UP:])
    print(f"to the first event: median {1e3 * statistics.median(waits):.2f} ms, least {1e3 * waits[0]:.2f} ms")
    print(f"front end, milliseconds of CPU per prompt: {1e3 * cpu_s / args.prompts:.2f}")


def _large_vocabulary(folder: Path) -> Path:
    """The model's text, said to have as many tokens as a published model."""
    copy = folder / MODEL.name
    copy.mkdir()
    for path in (*MODEL.glob("*.json"), *MODEL.glob("*.jinja")):
        shutil.copy(path, copy)
    config = json.loads((copy / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.update({name: VOCABULARY for name in ("vocab_size", "vocab_size_per_layer_input") if name in part})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


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
    parser.add_argument("--prompt-tokens", type=int, default=0, help="time prompts of so many token ids")
    parser.add_argument("--prompts", type=int, default=200, help="how many of them")
    parser.add_argument("--port", type=int, default=18471)
    args = parser.parse_args()
    if not args.prompt_tokens:
        with _worker(MODEL, args, step_seconds=args.step_ms / 1e3) as pid:
            asyncio.run(_measure(pid, args.port, args))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = _large_vocabulary(Path(folder))
        _time_parts(model, args)
        with _worker(model, args, step_seconds=0.0, max_model_len=LONGEST) as pid:
            asyncio.run(_measure_prompts(pid, args.port, model, args))


@contextmanager
def _worker(model: Path, args: argparse.Namespace, **settings: float) -> Iterator[int]:
    """A worker over a stub engine with these settings; its process id."""
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    worker = subprocess.Popen(
        [
            sys.executable, str(ROOT / "tests/worker/server/stub_worker.py"), json.dumps(settings), os.devnull, "serve",
            "--model", str(model), "--host", "127.0.0.1", "--port", str(args.port),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*(str(ROOT / folder) for folder in FOLDERS), *given])},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield worker.pid
    finally:
        worker.terminate()
        worker.wait()
