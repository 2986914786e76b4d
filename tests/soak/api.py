"""Mutated bodies and a long run of requests against one worker on the CPU: no 5xx, and memory that stays.

    PYTHONPATH=tests python tests/soak/api.py [--bodies 5000] [--requests 2000]

Bodies of every POST route are mutated (values, names, nesting, bytes) and sent; each must be answered below 500, and
the engine must live. Then requests of all kinds run, eight at a time; the resident sets of the front end and of the
engine are taken every 50 requests, and the slope over the last half of the run is printed in MB per 1,000 requests,
which is to be below 2. Exit code 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import statistics
import time
from collections import Counter
from typing import Any

import aiohttp

from bench.http.worker_on_cpu import WorkerOnCpu

AT_A_TIME = 8
MOST_MB = 2.0
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "How much is 2 plus 2?"}
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
HISTORY = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a", "content": "9"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "How much is", "max_tokens": 8, "logprobs": 2, "n": 2, "temperature": 1}),
    ("/v1/completions", {"prompt": [300, 301, 302], "max_tokens": 8, "echo": True, "stop": ["a"], "seed": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{1,3}"}}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 8, "stream": True, "reasoning_effort": "low"}),
    ("/v1/chat/completions", {"messages": HISTORY, "tools": [TOOL], "max_tokens": 8, "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 12, "response_format": FORMAT}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 8, "stream": True}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 8, "output_config": {"effort": "low"}}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [300, 301]}),
]
ODD = [
    None, True, False, 0, -1, 1, 2, 1e308, -0.5, 2**31, 2**63, 10**400, "", "a", "\ud800", "\x00", "<|turn>",
    "x" * 9999,
    [], [[]], {}, [None], [0], {"a": {}}, {"type": "function"}, "tiny", ["text"], [1.5], {"": ""}, [{}], "5", "NaN",
]  # fmt: skip


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """One to three changes somewhere in the document, or in its bytes."""
    document = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        _change(document, rng)
    data = json.dumps(document).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice([b"", b'"', b"{", b"\x00", b"\xff", b"e9", b",", b"\\u"]) + data[at + 1 :]
    return data


def _change(document: Any, rng: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        each = pending.pop()
        inner = each.items() if isinstance(each, dict) else enumerate(each)
        for key, value in list(inner):
            places.append((each, key))
            if isinstance(value, dict | list):
                pending.append(value)
    where, key = rng.choice(places)
    what = rng.random()
    if what < 0.6:
        where[key] = copy.deepcopy(rng.choice(ODD))
    elif what < 0.75 and isinstance(where, dict):
        where[rng.choice(["n", "stop", "min_tokens", "type", "x", key + "s"])] = copy.deepcopy(rng.choice(ODD))
    elif what < 0.9 and isinstance(where, dict) and key != "model":
        del where[key]
    else:
        where[key] = [where[key]] * rng.choice([1, 2, 200])


async def fuzz(worker: WorkerOnCpu, http: aiohttp.ClientSession, count: int) -> bool:
    rng = random.Random(1)
    statuses: Counter[int] = Counter()
    faults: list[str] = []

    async def one(number: int) -> None:
        route, body = BODIES[number % len(BODIES)]
        data = mutated({"model": "tiny", **body}, rng)
        headers = {"content-type": "application/json"}
        async with http.post(worker.url + route, data=data, headers=headers) as answer:
            text = await answer.text(errors="replace")
            statuses[answer.status] += 1
            if answer.status >= 500 or '"code": 500' in text or "internal_error" in text or "generation_failed" in text:
                faults.append(f"{answer.status} {route} {data[:300]!r}: {text[:200]}")

    await in_turn(one, count)
    print(f"{count} mutated bodies: {dict(sorted(statuses.items()))}, {len(faults)} faults of the server")
    for fault in faults[:5]:
        print(f"  {fault}")
    return not faults


async def soak(worker: WorkerOnCpu, http: aiohttp.ClientSession, count: int) -> bool:
    taken: dict[str, list[tuple[int, float]]] = {name: [] for name in worker.resident_bytes()}
    failed = 0

    async def one(number: int) -> None:
        nonlocal failed
        route, body = BODIES[number % len(BODIES)]
        async with http.post(worker.url + route, json={"model": "tiny", **body}) as answer:
            await answer.read()
            failed += answer.status != 200
        if number % 50 == 0:
            for name, size in worker.resident_bytes().items():
                taken[name].append((number, size / 1e6))

    began = time.monotonic()
    await in_turn(one, count)
    sound = not failed
    print(f"{count} requests in {time.monotonic() - began:.0f} s, {failed} failed")
    for name, figures in taken.items():
        last = [each for each in figures if each[0] >= count // 2]
        slope = 1000 * statistics.linear_regression([n for n, _ in last], [mb for _, mb in last]).slope
        sound &= slope < MOST_MB
        print(
            f"{name}: {figures[0][1]:.1f} MB at first, {last[0][1]:.1f} half way, {last[-1][1]:.1f} at the end; ",
            end="",
        )
        print(f"{slope:+.2f} MB per 1,000 requests over the last half (at most {MOST_MB:g})")
    return sound


async def in_turn(one: Any, count: int) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(some() for _ in range(AT_A_TIME)))


async def run(bodies: int, requests: int) -> bool:
    worker = WorkerOnCpu()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
            await worker.wait_until_ready(http)
            sound = await fuzz(worker, http, bodies) if bodies else True
            return (await soak(worker, http, requests) if requests else True) and sound
    finally:
        worker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    return 0 if asyncio.run(run(options.bodies, options.requests)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
