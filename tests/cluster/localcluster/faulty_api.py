"""A way to the API server that misbehaves on demand: what an operator behind it goes through is up to the test."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
_PASSED_ON = ("Content-Type", "Accept", "User-Agent")


class Fault(Enum):
    NONE = "everything passes"
    STORM = "every second read gets 429 or 500, and two of three writes 409 or 500; watches go on"
    EXPIRED = "every watch ends with 410, also one that is just begun"
    FROZEN = "watches stay open and deliver nothing"


class FaultyApi:
    """`url` is plain HTTP on 127.0.0.1, with the rights of the operator. Set `fault` from any thread."""

    def __init__(self, kubeconfig: Path) -> None:
        self.fault = Fault.NONE
        self.answered: dict[int, int] = dict.fromkeys(_REASONS, 0)  # errors that were made up, by status
        self.watched: set[str] = set()  # resources of which a watch has begun, by their plural
        self.url = ""
        self._upstream, self._tls = _credentials(kubeconfig)
        self._reads = itertools.cycle((429, None, 500, None))
        self._writes = itertools.cycle((409, 500, None))

    def write_kubeconfig(self, path: Path) -> None:
        named = {"name": "faulty"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "faulty",
            "clusters": [{**named, "cluster": {"server": self.url}}],
            "users": [{**named, "user": {}}],
            "contexts": [{**named, "context": {"cluster": "faulty", "user": "faulty"}}],
        }
        path.write_text(yaml.safe_dump(document))

    def stop(self) -> None:
        """From any thread, once it is served."""
        self._loop.call_soon_threadsafe(self._ended.set)

    async def serve(self, started: threading.Event) -> None:
        """Until `stop`; tells `started` when `url` is known."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await self._ended.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watches = request.query.get("watch") in ("1", "true")
        if self.fault is Fault.STORM and not watches and (status := self._refusal(request.method)):
            return web.json_response(_status(status), status=status, headers={"Retry-After": "1"})
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        body = await request.read() or None  # an empty one would be given a type
        async with self._session.request(
            request.method, self._upstream + request.path_qs, headers=headers, data=body
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            if watches:
                self.watched.add(request.path.rpartition("/")[2])
                await self._pass_events(answer, response)
            else:
                await response.write(await answer.read())
            return response

    async def _pass_events(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        chunks = answer.content.iter_any()
        reading = asyncio.ensure_future(anext(chunks))
        try:
            while self.fault is not Fault.EXPIRED:
                await asyncio.wait({reading}, timeout=0.2)
                if reading.done() and self.fault is not Fault.FROZEN:
                    await response.write(reading.result())
                    reading = asyncio.ensure_future(anext(chunks))
            self.answered[410] += 1
            await response.write(json.dumps({"type": "ERROR", "object": _status(410)}).encode() + b"\n")
            await asyncio.sleep(0.2)  # a client that asks again at once would be a storm of its own
        except (StopAsyncIteration, ConnectionError):  # either side has gone
            pass
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, aiohttp.ClientError):
                await reading

    def _refusal(self, method: str) -> int | None:
        status = next(self._reads if method == "GET" else self._writes)
        if status is not None:
            self.answered[status] += 1
        return status


def _status(code: int) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"made up by a test: {_REASONS[code]}",
        "reason": _REASONS[code],
        "code": code,
    }


def _credentials(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Address and TLS of the only cluster and user in a kubeconfig that carries its certificates within itself."""
    document = yaml.safe_load(kubeconfig.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(
        cadata=base64.b64decode(cluster["certificate-authority-data"]).decode(),
    )
    with tempfile.NamedTemporaryFile() as both:
        for part in ("client-certificate-data", "client-key-data"):
            both.write(base64.b64decode(user[part]))
        both.flush()
        context.load_cert_chain(both.name)
    return cluster["server"], context


@contextmanager
def faulty_api(kubeconfig: Path) -> Iterator[FaultyApi]:
    """The proxy in a thread of its own, while the context lasts."""
    api, started = FaultyApi(kubeconfig), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(api.serve(started)), name="faulty-api")
    thread.start()
    try:
        assert started.wait(60)
        yield api
    finally:
        api.stop()
        thread.join(10)
