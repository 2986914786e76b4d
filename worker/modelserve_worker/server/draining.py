"""Closes connections after SIGTERM so that no request fails while the pod leaves its Service.

Clients keep connections and send their next request on them whenever they like, so a server that closes one may cross a
request that is on its way: the client sees an error that no client library hides without retries. Only an answer that
says `Connection: close` is understood by both sides at the same moment. So, after SIGTERM:

- Every answer says it, also those on connections that are new: their endpoint may be known to somebody for seconds.
- A connection whose stream began before the signal stays open behind it: its next answer says it.
- A connection that nobody uses is closed once it has been idle for longer than clients keep one (IDLE_SECONDS).
- New connections are accepted for the delay, within which every endpoint of a Service is gone. After it, bodies that
  are still coming have a moment left (request_body.py).
"""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from modelserve_worker.server.state import Phase, ServerState

IDLE_SECONDS = 6.0
"""The openai client and httpx reuse a connection for 5 s after an answer, and this server starts to count earlier than
they do only by the time that an answer travels."""

_CLOSE = (b"connection", b"close")
_LOOK_INTERVAL_S = 0.1


class CloseWhileDraining:
    """ASGI middleware around the whole application: answers that begin while the server drains end their connection."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._state.phase is Phase.DRAINING:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        await self._app(scope, receive, closing)


async def drain(server: uvicorn.Server, state: ServerState, *, delay_s: float, limit_s: float) -> bool:
    """Accept connections for `delay_s` seconds, then no more; return when the last one is closed.

    False when some still wait for an answer `limit_s` seconds after the delay, or when the engine has stopped.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    idle_since: dict[H11Protocol, float] = {}
    accepting = True
    while state.alive():
        now = loop.time()
        if accepting and now - began >= delay_s:
            accepting = False
            state.last_call.set()
            for listening in server.servers:
                listening.close()
        connections = _connections(server)
        idle_since = {each: idle_since.get(each, now) for each in connections if _is_idle(each)}
        for connection, since in idle_since.items():
            if now - since >= IDLE_SECONDS:
                connection.shutdown()
        if not accepting and not connections:
            return True
        if now - began >= delay_s + limit_s:
            return all(map(_is_idle, connections))
        await asyncio.sleep(_LOOK_INTERVAL_S)
    return False


def _connections(server: uvicorn.Server) -> list[H11Protocol]:
    return [each for each in server.server_state.connections if isinstance(each, H11Protocol)]


def _is_idle(connection: H11Protocol) -> bool:
    """No request is being answered, so that `shutdown` closes the connection at once."""
    cycle: object = connection.cycle  # None before the first request
    return cycle is None or connection.cycle.response_complete
