"""What abuse does to everybody else, measured on a real server.

    python tests/bench abuse [SCENARIO ...]

A worker serves a small checkpoint on the CPU. Beside each abuse, a prober asks /health, streams run, and short requests
come one after the other; their figures stand beside those without the abuse.

    health      worst answer time of /health                                        goal: below 0.5 s
    gap         longest silence of a running stream                                  goal: below 0.5 s
    ttft p99    of short requests of a bystander with a key of its own               goal: within 2x of "alone"
    front end   largest resident set of the process that speaks HTTP
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.entries import command
from bench.http.worker_on_cpu import WorkerOnCpu

ABUSER, BYSTANDER = "abuser-key", "bystander-key"
JSON = {"content-type": "application/json"}


@dataclass
class Seen:
    """What the bystanders saw; seconds and bytes."""

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    resident_bytes: int = 0

    def line(self) -> str:
        ranked = sorted(self.first_tokens)
        p99 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))] if ranked else float("nan")
        p50 = ranked[len(ranked) // 2] if ranked else float("nan")
        return (
            f"health {max(self.health, default=float('nan')) * 1e3:7.0f} ms   "
            f"gap {max(self.gaps, default=float('nan')) * 1e3:7.0f} ms   "
            f"ttft p50 {p50 * 1e3:6.0f} p99 {p99 * 1e3:6.0f} ms (n={len(ranked)})   "
            f"front end {self.resident_bytes / 1e6:5.0f} MB   failures {len(self.failures)}   "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [2, 600, 601], "stream": True, "ignore_eos": True, **fields}


async def _watch_health(server: WorkerOnCpu, http: aiohttp.ClientSession, seen: Seen) -> None:
    while True:
        began = time.monotonic()
        try:
            async with http.get(f"{server.url}/health", timeout=aiohttp.ClientTimeout(120)) as answer:
                if answer.status != 200:
                    seen.failures.append(f"/health {answer.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.failures.append(repr(error))
        seen.health.append(time.monotonic() - began)
        seen.resident_bytes = max(seen.resident_bytes, server.resident_bytes()["front end"])
        await asyncio.sleep(0.02)


async def _run_stream(server: WorkerOnCpu, http: aiohttp.ClientSession, seen: Seen) -> None:
    while True:
        last = None
        async with http.post(
            f"{server.url}/v1/completions", json=_body(max_tokens=1500), headers=_key(BYSTANDER)
        ) as answer:
            async for _ in answer.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    seen.gaps.append(now - last)
                last = now


async def _ask(server: WorkerOnCpu, http: aiohttp.ClientSession, seen: Seen) -> None:
    """An answer that has not begun when the watch ends counts with what it has waited so far."""
    while True:
        began, first = time.monotonic(), True
        try:
            async with http.post(
                f"{server.url}/v1/completions", json=_body(max_tokens=2), headers=_key(BYSTANDER)
            ) as answer:
                async for _ in answer.content.iter_any():
                    if first:
                        seen.first_tokens.append(time.monotonic() - began)
                        first = False
                if answer.status != 200:
                    seen.failures.append(f"short request {answer.status}")
        except asyncio.CancelledError:
            if first:
                seen.first_tokens.append(time.monotonic() - began)
            raise
        await asyncio.sleep(0.02)


async def beside(
    server: WorkerOnCpu, http: aiohttp.ClientSession, abuse: Coroutine[Any, Any, None] | None, *, streams: int
) -> Seen:
    """Watch the bystanders for 10 s, or for as long as `abuse` takes where that is longer."""
    seen = Seen()
    watchers = [asyncio.create_task(_watch_health(server, http, seen)), asyncio.create_task(_ask(server, http, seen))]
    watchers += [asyncio.create_task(_run_stream(server, http, seen)) for _ in range(streams)]
    await asyncio.sleep(1)
    for values in (seen.health, seen.gaps, seen.first_tokens):
        values.clear()
    began = time.monotonic()
    if abuse is not None:
        await abuse
    await asyncio.sleep(max(0.0, 10 - (time.monotonic() - began)))
    for task in watchers:
        task.cancel()
    ended = await asyncio.gather(*watchers, return_exceptions=True)
    seen.failures += [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
    return seen


async def _send(url: str, http: aiohttp.ClientSession, body: bytes, route: str = "completions") -> int:
    try:
        async with http.post(f"{url}/v1/{route}", data=body, headers=JSON | _key(ABUSER)) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0  # the server closed the connection under a body that it had already refused


async def bodies(url: str, http: aiohttp.ClientSession) -> None:
    text = json.dumps({"model": "tiny", "prompt": "x" * 31_000_000}).encode()
    unknown = json.dumps({"model": "tiny", "prompt": "x", "junk": ["y"] * 6_000_000}).encode()
    messages = b'{"model":"tiny","messages":[' + b'{"role":"user","content":"a"},' * 1_000_000 + b"{}]}"
    requests = [_send(url, http, text) for _ in range(8)]
    requests += [_send(url, http, unknown), _send(url, http, messages, "chat/completions")]
    print("    answers:", sorted(await asyncio.gather(*requests)))


async def largest_bodies(url: str, http: aiohttp.ClientSession) -> None:
    """The worst that the limits let in: all of it is read, and most of it parsed."""
    size = 4_000_000
    lists = b'{"model":"tiny","prompt":"a","user":[' + b"[]," * 99_000 + b"1]}"
    ids = b'{"model":"tiny","prompt":[' + b"600," * 499_000 + b"1]}"
    strings = b'{"model":"tiny","prompt":"a","user":[' + b'"",' * (size // 3) + b"1]}"
    junk = json.dumps({"model": "tiny", "prompt": "x1y2" * (size // 4)}).encode()
    escaped = b'{"model":"tiny","prompt":"' + b"\\u0431" * (size // 6) + b'"}'
    messages = b'{"model":"tiny","messages":[' + b'{"role":"user","content":"a"},' * 32_000
    messages += b'{"role":"user","content":"a"}]}'
    requests = [_send(url, http, body) for body in (lists, ids, strings, junk, escaped) for _ in range(2)]
    requests += [_send(url, http, messages, "chat/completions")]
    print("    answers:", sorted(await asyncio.gather(*requests)))


async def half_open(url: str, _: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    sockets = []
    for _number in range(1100):
        connection = socket.socket()
        connection.setblocking(False)
        sockets.append(connection)
        await loop.sock_connect(connection, ("127.0.0.1", int(url.rpartition(":")[2])))
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, b"POST /v1/completions HTTP/1.1\r\nHost:")
    await asyncio.sleep(8)
    for connection in sockets:
        connection.close()


async def many_prompts(url: str, http: aiohttp.ClientSession) -> None:
    body = _body(prompt=[[2, 600 + number % 100] for number in range(512)], max_tokens=200, stream=False)
    request = asyncio.create_task(_send(url, http, json.dumps(body).encode()))
    await asyncio.wait({request}, timeout=20)
    request.cancel()


async def many_streams(url: str, http: aiohttp.ClientSession) -> None:
    body = json.dumps(_body(max_tokens=200)).encode()
    requests = [asyncio.create_task(_send(url, http, body)) for _ in range(500)]
    done, waiting = await asyncio.wait(requests, timeout=20)
    answers = [task.result() for task in done]
    print(
        "    answers:", {status: answers.count(status) for status in sorted(set(answers))}, "unfinished:", len(waiting)
    )
    for request in waiting:
        request.cancel()


_GROWING = "start: s\ns: " + " | ".join(['"a"', "s s", "s s s", "s s s s s"])
_GRAMMARS = ('start: (("a"?)~0..10000)~0..10000', 'start: "a" start', _GROWING, "start: s\ns: /[a-z]/ | s s | s s s")


async def grammars(url: str, http: aiohttp.ClientSession) -> None:
    """Twenty-four answers of each at once: the first two are refused, the others cost more with every token."""
    for grammar in _GRAMMARS:
        body = _body(n=24, max_tokens=150, temperature=1, stream=False, structured_outputs={"grammar": grammar})
        began = time.monotonic()
        status = await _send(url, http, json.dumps(body).encode())
        print(f"    {grammar[:40]!r}: {status} after {time.monotonic() - began:.2f} s")


async def slow_reader(url: str, _: aiohttp.ClientSession) -> None:
    await _never_read(url, _body(max_tokens=1900, logprobs=5))


async def slow_reader_of_16(url: str, _: aiohttp.ClientSession) -> None:
    await _never_read(url, _body(n=16, max_tokens=1900, logprobs=5))


async def _never_read(url: str, request: dict[str, Any]) -> None:
    body = json.dumps(request).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ABUSER}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(head.encode() + body)
        await asyncio.sleep(15)


async def stop_beside_half_a_body(server: WorkerOnCpu) -> float:
    """Seconds from SIGTERM to the end of the process."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer " + ABUSER.encode() + b"\r\nContent-Length: 900\r\n\r\n{"
        )
        await asyncio.sleep(0.5)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, 60)
        return time.monotonic() - began


SCENARIOS: dict[str, Callable[[str, aiohttp.ClientSession], Coroutine[Any, Any, None]]] = {
    "bodies": bodies,
    "largest-bodies": largest_bodies,
    "half-open": half_open,
    "many-prompts": many_prompts,
    "many-streams": many_streams,
    "grammars": grammars,
    "slow-reader": slow_reader,
    "slow-reader-of-16": slow_reader_of_16,
}


async def _abuse_from_elsewhere(name: str, url: str) -> None:
    """A process of its own, whose work does not delay what the bystanders measure."""
    process = await asyncio.create_subprocess_exec(*command("abuse", "--abuse", url, name))
    await process.wait()


async def _abuse(url: str, name: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
        await SCENARIOS[name](url, http)


async def _measure(names: list[str]) -> None:
    for name in names:
        keys = ("--api-key", ABUSER, "--api-key", BYSTANDER)
        server = WorkerOnCpu(*keys, descriptors=1024 if name == "half-open" else None)
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
                await server.wait_until_ready(http)
                print(f"{name}, alone:  {(await beside(server, http, None, streams=4)).line()}", flush=True)
                logged = server.log_lines()
                seen = await beside(server, http, _abuse_from_elsewhere(name, server.url), streams=4)
                print(f"{name}, beside: {seen.line()}   log lines {server.log_lines() - logged}", flush=True)
                if seen.failures:
                    print("    failures:", seen.failures[:3])
            print(f"    SIGTERM beside half a body: {await stop_beside_half_a_body(server):.2f} s", flush=True)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--abuse", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.scenarios or list(SCENARIOS)
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; known are {', '.join(SCENARIOS)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_measure(names) if arguments.abuse is None else _abuse(arguments.abuse, names[0]))
