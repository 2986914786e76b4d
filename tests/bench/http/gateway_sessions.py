"""Sessions of several turns over two workers behind a gateway: what each turn finds cached, by how the gateway chooses.

The gateway is HAProxy (Debian package `haproxy`), with a front end for each way:

- cookie: the gateway gives a client a cookie that names its worker
- header: a hash of the header X-Session-Id, consistent where workers come and go
- none: whoever's turn it is

    .venv/bin/python tests/bench gateway_sessions [--json]

prints how much of every turn's prompt was cached, of three sessions that take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from bench.http.worker_on_cpu import WorkerOnCpu

WAYS = {
    "cookie": "balance roundrobin\n  cookie worker insert indirect nocache",
    "header": "balance hdr(X-Session-Id)\n  hash-type consistent",
    "none": "balance roundrobin",
}
SESSIONS = ("of apples", "of trains", "of rain")  # an odd number: else whose turn it is would be the same every time
TURNS = 5
LINES = 6  # of what a user says


class Turn(NamedTuple):
    """Tokens of a prompt, and how many of them were cached."""

    prompt: int
    cached: int


@contextmanager
def gateway(workers: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """Base address of the gateway by way, while the context lasts. `workers`: HOST:PORT of each."""
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        sockets = dict(zip(WAYS, (first, second, third), strict=True))
        for each in sockets.values():
            each.bind(("127.0.0.1", 0))
        ports = {way: each.getsockname()[1] for way, each in sockets.items()}
    text = "defaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n"
    for way, chooses in WAYS.items():
        text += f"listen {way}\n  bind 127.0.0.1:{ports[way]}\n  {chooses}\n"
        text += "".join(f"  server w{number} {each} cookie w{number}\n" for number, each in enumerate(workers))
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen([program, "-db", "-q", "-f", str(folder / "haproxy.cfg")])
    try:
        for port in ports.values():
            _wait_for_listener(port, process)
        yield {way: f"http://127.0.0.1:{port}" for way, port in ports.items()}
    finally:
        process.terminate()
        process.wait()


def _wait_for_listener(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, "HAProxy ended: it has said why"
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@asynccontextmanager
async def two_workers() -> AsyncIterator[list[str]]:
    """HOST:PORT of two ready workers."""
    workers = [WorkerOnCpu(), WorkerOnCpu()]
    try:
        async with aiohttp.ClientSession() as http:
            for each in workers:
                await each.wait_until_ready(http)
        yield [each.url.removeprefix("http://") for each in workers]
    finally:
        for each in workers:
            each.stop()


async def sessions(url: str, *, salt: str) -> dict[str, list[Turn]]:
    """The turns of SESSIONS at one gateway, one of each after the other; `salt` makes them unlike any before.

    Each session has a client of its own, with cookies and a header that names it; each request has its own connection.
    """
    found: dict[str, list[Turn]] = {name: [] for name in SESSIONS}
    said: dict[str, list[dict[str, str]]] = {name: [] for name in SESSIONS}
    clients = {
        name: aiohttp.ClientSession(
            headers={"X-Session-Id": f"{salt} {name}", "Connection": "close"},
            cookie_jar=aiohttp.CookieJar(unsafe=True),  # also of an address that is no name
        )
        for name in SESSIONS
    }
    try:
        for turn in range(TURNS):
            for name, http in clients.items():
                text = "\n".join(f"{salt}, turn {turn}, line {line} {name}." for line in range(LINES))
                said[name].append({"role": "user", "content": text})
                body = {"model": "tiny", "messages": said[name], "max_tokens": 8, "temperature": 0}
                async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                    document = await answer.json()
                    assert answer.status == 200, document
                said[name].append({"role": "assistant", "content": document["choices"][0]["message"]["content"] or ""})
                usage = document["usage"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                found[name].append(Turn(usage["prompt_tokens"], cached))
    finally:
        for http in clients.values():
            await http.close()
    return found


async def by_way() -> dict[str, dict[str, list[Turn]]]:
    """All ways, with the same two workers."""
    with tempfile.TemporaryDirectory() as folder:
        async with two_workers() as workers:
            with gateway(workers, Path(folder)) as urls:
                return {way: await sessions(url, salt=way) for way, url in urls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures of every turn")
    options = parser.parse_args()
    measured = asyncio.run(by_way())
    if options.json:
        print(json.dumps(measured))
        return 0
    for way, found in measured.items():
        for name, turns in found.items():
            shares = "  ".join(f"{each.cached:4d}/{each.prompt:4d}" for each in turns)
            print(f"{way:7} {name:10} {shares}")
    return 0
