"""What a long prompt does to a stream beside it.

    python tests/bench beside_prompt --runs 3

Starts a worker on the CPU, with as many threads as there are cores. In each run a prompt of --tokens tokens is
answered alone, then another one beside a stream. Prints of each run both times to the first token, the stream's gaps
alone, and of those that overlap the prompt's wait p50, p95 and the largest; then medians over the runs. Two --source
trees are compared in turns. Other programs on the machine count: the load average stands beside each run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from bench.http.worker_on_cpu import ROOT, WorkerOnCpu

_FIRST_TOKENS = 15  # of the stream, before the prompt comes: its gaps alone


async def tokens(http: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> AsyncIterator[float]:
    """When each token came."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 1,
    }  # fmt: skip
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


async def first_token(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[float, float]:
    """When the prompt was sent, and when its first token came."""
    sent = time.perf_counter()
    async for at in tokens(http, url, prompt, 1):
        return sent, at
    raise AssertionError("no token came")


async def one_run(http: aiohttp.ClientSession, url: str, count: int, rng: random.Random) -> dict[str, float]:
    def prompt(length: int) -> list[int]:
        return [rng.randrange(300, 2000) for _ in range(length)]

    sent, came = await first_token(http, url, prompt(count))
    times: list[float] = []
    started = asyncio.Event()

    async def stream() -> None:
        async for at in tokens(http, url, prompt(10), 4000):
            times.append(at)
            if len(times) == _FIRST_TOKENS:
                started.set()

    reading = asyncio.create_task(stream())
    await started.wait()
    beside = await first_token(http, url, prompt(count))
    await asyncio.sleep(1.0)
    reading.cancel()
    pairs = list(itertools.pairwise(times))
    alone = [end - start for start, end in pairs if end <= beside[0]]
    gaps = sorted(end - start for start, end in pairs if end > beside[0] and start < beside[1])
    return {
        "TTFT alone": came - sent,
        "TTFT beside": beside[1] - beside[0],
        "gap alone, largest": max(alone),
        "gaps": len(gaps),
        "p50": statistics.median(gaps),
        "p95": gaps[min(len(gaps) - 1, round(0.95 * len(gaps)))],
        "largest": gaps[-1],
        "load": os.getloadavg()[0],
    }


def shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests/models/gemma4-tiny-keqv")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--source", type=Path, nargs="+", default=[ROOT], help="checkouts of this repository")
    parser.add_argument("flags", nargs="*", help="of `serve`, behind --")
    options = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {source: [] for source in options.source}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for run in range(options.runs):
            for source, of_source in found.items():
                worker = WorkerOnCpu(
                    "--model", str(options.model), "--max-model-len", "8192", "--max-num-batched-tokens", "2048",
                    "--no-prefix-caching", *options.flags, threads=os.cpu_count() or 1, source=source,
                )  # fmt: skip
                try:
                    await worker.wait_until_ready(http)
                    await first_token(http, worker.url, [300] * 20)
                    of_source.append(await one_run(http, worker.url, options.tokens, random.Random(run)))
                finally:
                    worker.stop()
                print(f"{source}, run {run}: {shown(of_source[-1])}", flush=True)
    for source, of_source in found.items():
        medians = {name: statistics.median(run[name] for run in of_source) for name in of_source[0]}
        print(f"{source}, medians: {shown(medians)}")
