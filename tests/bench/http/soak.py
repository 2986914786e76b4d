"""Minutes of mixed traffic through HTTP on a shallow model with real head sizes, and what must be as it was before.

    python tests/bench soak --variant 31B --layers 6 --minutes 8 --gpu-memory-utilization 0.12 [--seed 0]

Prompts are log-uniform to --longest tokens, answers log-uniform to 1,000. Of the clients a fifth hang up in the middle
of their stream, a tenth before its first token. The pool is small, so requests are preempted. Flags that are not listed
by --help go to the worker. Prints a line every 20 s (requests ended, running, preemptions, pages, memory of the
processes and of the device), then what was wrong, and exits with 1 if anything was: a request that failed, nothing
finished for a minute (a deadlock), pages held at the end, memory that grew by more than 5 % after the first quarter, a
greedy answer that is not what it was before the traffic, or a process that did not end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.http.serve_and_bench import WorkerProcess
from bench.random_checkpoint import read_config, write_model

STREAMS = 48
LONGEST_ANSWER = 1000
HANG_UP, HANG_UP_AT_ONCE = 0.2, 0.1
DEADLOCK_SECONDS = 60.0
GROWTH = 1.05
SAMPLE_SECONDS = 20.0


@dataclass
class Traffic:
    """What one soak has seen."""

    random: random.Random
    vocab_size: int
    longest: int
    finished: int = 0
    hung_up: int = 0
    last_end: float = field(default_factory=time.monotonic)
    faults: list[str] = field(default_factory=list)

    def length(self, most: int) -> int:
        return int(math.exp(self.random.uniform(math.log(4), math.log(most))))

    def prompt(self) -> list[int]:
        return [self.random.randrange(self.vocab_size // 2, self.vocab_size) for _ in range(self.length(self.longest))]

    async def client(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._request(session)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")
            self.last_end = time.monotonic()

    async def _request(self, session: aiohttp.ClientSession) -> None:
        answer, patience = self.length(LONGEST_ANSWER), self.random.random()
        body = {
            "model": "soak", "prompt": self.prompt(), "max_tokens": answer, "ignore_eos": True, "stream": True,
            "temperature": self.random.choice([0, 0.7, 1]), "top_k": self.random.choice([0, 20, 64]), "top_p": 0.95,
        }  # fmt: skip
        if patience < HANG_UP_AT_ONCE:
            try:
                async with asyncio.timeout(self.random.uniform(0.01, 0.5)):
                    await self._read(session, body, stop_after=math.inf)
            except TimeoutError:
                self.hung_up += 1
                return
        elif patience < HANG_UP_AT_ONCE + HANG_UP:
            await self._read(session, body, stop_after=self.random.randrange(1, answer + 1))
            self.hung_up += 1
            return
        else:
            tokens = await self._read(session, body, stop_after=math.inf)
            if tokens != answer:
                self.faults.append(f"{tokens} tokens came, {answer} were asked for")
        self.finished += 1

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, object], *, stop_after: float) -> int:
        """Tokens of the answer by its usage; -1 where it was left before its end."""
        seen, tokens = 0, 0
        streamed = body | {"stream_options": {"include_usage": True}}
        async with session.post("/v1/completions", json=streamed) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                seen += 1
                if seen >= stop_after:
                    return -1
        return tokens


async def greedy(session: aiohttp.ClientSession, vocab_size: int, length: int) -> str:
    """One request alone, whose answer depends on nothing but the engine."""
    prompt = random.Random(7).choices(range(vocab_size // 2, vocab_size), k=length)
    body = {"model": "soak", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    async with session.post("/v1/completions", json=body) as response:
        return json.dumps((await response.json())["choices"][0]["logprobs"]["tokens"])


async def sample(session: aiohttp.ClientSession, worker: WorkerProcess) -> dict[str, float]:
    """Running and waiting requests, preemptions, pool bytes held; MiB of the worker's processes and of the device."""
    async with session.get("/metrics") as response:
        text = await response.text()
    found = {name: metric(text, f"vllm:num_{name}") for name in ("requests_running", "requests_waiting")}
    found |= {
        "preemptions": metric(text, "vllm:num_preemptions_total"),
        "held": metric(text, "modelserve_kv_held_bytes"),
    }
    return found | {
        "rss": await asyncio.to_thread(anonymous_mib, worker),
        "device": await asyncio.to_thread(device_mib),
    }


def metric(text: str, name: str) -> float:
    """Sum over the labels of one metric."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(float(value) for value in values)


def anonymous_mib(worker: WorkerProcess) -> float:
    """Anonymous memory of all processes of the worker."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if worker.is_ours(stat):
                found = re.search(r"RssAnon:\s+(\d+)", (stat.parent / "status").read_text())
                total += int(found.group(1)) if found else 0
        except OSError:  # it has just ended
            continue
    return total / 1024


def device_mib() -> float:
    """Used memory of the device that CUDA_VISIBLE_DEVICES names; 0 without one."""
    if not shutil.which("nvidia-smi"):
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return float(used[int(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))])


async def soak(worker: WorkerProcess, traffic: Traffic, minutes: float) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(worker.url, timeout=timeout, connector=connector) as session:
        before = await greedy(session, traffic.vocab_size, min(3000, traffic.longest))
        began = time.monotonic()
        until = began + 60 * minutes
        clients = [asyncio.create_task(traffic.client(session, until)) for _ in range(STREAMS)]
        settled: dict[str, float] | None = None
        while any(not client.done() for client in clients):
            await asyncio.sleep(min(SAMPLE_SECONDS, 15 * minutes))
            now = await sample(session, worker)
            print(
                f"{time.monotonic() - began:5.0f} s: {traffic.finished} finished, {traffic.hung_up} hung up, "
                f"{len(traffic.faults)} faults; " + ", ".join(f"{name} {value:,.0f}" for name, value in now.items()),
                flush=True,
            )
            if time.monotonic() - began > 15 * minutes and settled is None:
                settled = now
            if time.monotonic() - traffic.last_end > DEADLOCK_SECONDS:
                traffic.faults.append(f"nothing ended for {DEADLOCK_SECONDS:g} s")
                for client in clients:
                    client.cancel()
                break
        await asyncio.sleep(3)
        after = await sample(session, worker)
        print("after: " + ", ".join(f"{name} {value:,.0f}" for name, value in after.items()))
        for name in ("requests_running", "requests_waiting", "held"):
            if after[name]:
                traffic.faults.append(f"{name} is {after[name]:g} with nobody there")
        for name in ("rss", "device"):
            if settled is not None and after[name] > GROWTH * settled[name]:
                traffic.faults.append(f"{name} grew from {settled[name]:.0f} to {after[name]:.0f} MiB")
        if await greedy(session, traffic.vocab_size, min(3000, traffic.longest)) != before:
            traffic.faults.append("a greedy answer is another one than before the traffic")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variant", required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--longest", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options, worker_flags = parser.parse_known_args()
    config = read_config(options.variant)
    text = config["text_config"]
    text["num_hidden_layers"] = options.layers
    text["layer_types"] = text["layer_types"][: options.layers]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "soak"
        architecture = write_model(checkpoint, config)
        flags = ["--max-model-len", str(options.longest + LONGEST_ANSWER + 1), *worker_flags]
        traffic = Traffic(random.Random(options.seed), min(255_000, architecture.vocab_size), options.longest)
        with WorkerProcess(checkpoint, flags, log=Path(directory) / "worker.log") as worker:
            print(f"ready after {worker.wait_until_ready(300):.1f} s", flush=True)
            asyncio.run(soak(worker, traffic, options.minutes))
            fault = worker.end()
        faults = traffic.faults + ([fault] if fault else [])
        if faults:
            print(worker.log_end())
    print("\n".join([f"{len(faults)} faults", *faults[:20]]))
    return 1 if faults else 0
