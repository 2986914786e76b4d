"""Connections: never more than there are file descriptors for, and none that waits for ever for its request.

At the limit the connection that has been without a request for longest makes room: half-open sockets, and kept
connections that nobody uses. Only where all of them are being answered is a new one turned away.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.chunk_writer import ChunkWriter
from modelserve_worker.server.http.message_framing import StrictReceiveBuffer

ACCEPTED_AT_ONCE = 16  # in one turn of the event loop
_TURNS = 8  # at most, from an accepted socket to the end of the one that makes room for it
_OTHER_DESCRIPTORS = 96  # listeners, the engine, files, and lookups of names
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"all connections of this server are in use; try again","type":"server_error",'
    b'"param":null,"code":"unavailable"}}'
)

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def most_connections(descriptors: int) -> int:
    """Connections that `descriptors` leave room for; at least one."""
    return max(1, descriptors - _OTHER_DESCRIPTORS - _TURNS * ACCEPTED_AT_ONCE)


class Connections:
    """The open connections of one server, those without a request in the order in which they became so."""

    def __init__(self, limit: int, *, header_s: float, discard_s: float, write_s: float) -> None:
        self.limit = limit
        self.write_s = write_s
        self.header_s = header_s
        self.discard_s = discard_s
        self._open: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}

    def entered(self, connection: Connection) -> bool:
        """Whether there is room for it, where necessary in the place of one without a request."""
        if len(self._open) >= self.limit:
            if not self._without_request:
                log.warning("all %d connections are being answered; a new one is turned away", self.limit)
                return False
            log.warning("there are %d connections; the one longest without a request is closed", self.limit)
            longest = next(iter(self._without_request))
            self.left(longest)
            longest.transport.abort()
        self._open.add(connection)
        self._without_request[connection] = None
        return True

    def left(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._without_request.pop(connection, None)

    def has_request(self, connection: Connection) -> None:
        self._without_request.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        if connection in self._open:
            self._without_request[connection] = None


class Connection(H11Protocol):
    """uvicorn's connection, with deadlines for the head of a request and for a client that does not read its answer,
    and its place among the others.
    """

    def __init__(self, connections: Connections, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # Of request heads that can be read in two ways, h11 would read some.
        self.conn._receive_buffer = StrictReceiveBuffer()
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._connections.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.entered(self):
            self._close_after(self._connections.header_s)
        else:
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.left(self)
        self._stop_deadline()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_waiting() and self._deadline is None:
            self._close_after(self._connections.header_s)  # the head of a request on a kept connection begins
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """The end of what this connection may send: `msg` is uvicorn's, the fault is what h11 has just raised. The
        status is 431 where headers are too long."""
        fault = sys.exception()
        status = 431 if getattr(fault, "error_status_hint", 400) == 431 else 400
        said = "its headers are too long; send fewer or shorter ones" if status == 431 else fault or msg
        error = ApiError(f"not an HTTP request that can be answered: {said}", status=status, code="invalid_http")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(error.body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(content))),
                ("connection", "close"),
            ]
            for part in (h11.Response(status_code=status, headers=headers), h11.Data(content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_waiting():
            self._stop_deadline()
            self._connections.has_request(self)
            ChunkWriter.offer(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_waiting():
            self._connections.waits(self)
            if self.cycle.more_body:  # answered before its body had come; the rest of it is thrown away, for a while
                self._close_after(self._connections.discard_s)

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_after(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
