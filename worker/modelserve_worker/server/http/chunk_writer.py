"""Pieces of a streamed body, straight to their connection.

Between an application and its connection stand middleware, which looks at heads alone, and h11, whose state no piece of
a body changes; each of them costs every piece as much as a piece costs itself. So a connection offers a way past them
to answers that come in many small pieces. Heads and ends go the long way: whoever counts, names or closes sees them.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

_KEY = "modelserve.chunk_writer"


class ChunkWriter:
    """Sends pieces of one answer's body behind its head, which has no Content-Length, in chunks (RFC 9112, 7.1)."""

    def __init__(self, connection: H11Protocol) -> None:
        self._cycle = connection.cycle
        self._flow = connection.flow
        self._transport = connection.transport

    @classmethod
    def offer(cls, connection: H11Protocol) -> None:
        """To whoever answers the connection's present request, unless its client is too old for chunks, or its answer
        has no body."""
        scope: Any = connection.scope
        if _KEY not in scope and scope["http_version"] >= "1.1" and scope["method"] != "HEAD":
            scope[_KEY] = cls(connection)

    @classmethod
    def of(cls, scope: Scope) -> ChunkWriter | None:
        writer: ChunkWriter | None = scope.get(_KEY)
        return writer

    async def send(self, piece: bytes) -> None:
        """Wait while the client does not read, as uvicorn's own `send` does; nothing goes to a client that has left."""
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if piece and not self._cycle.disconnected:  # a chunk of no bytes would end the body
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
