"""The outermost middleware: every request gets its context, and gives back what it held at its end."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

from modelserve_worker.server.body_limits import OpenBodies
from modelserve_worker.server.request_context import RequestContext


class Entrance:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, open_bodies: OpenBodies) -> None:
        self._app = app
        self._open_bodies = open_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        with self._open_bodies.account() as account:
            RequestContext(uuid.uuid4().hex, client[0] if client else "", account).attach(scope)
            await self._app(scope, receive, send)
